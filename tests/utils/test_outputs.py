"""Checks of the output paths of a command."""

import os
from pathlib import Path

import pytest

from paddle_resnet.utils import outputs
from paddle_resnet.utils.errors import UsageError


@pytest.fixture
def root(tmp_path):
    """Create a data set, a run folder that contains a checkpoint, and links to both. Return their parent folder."""
    (tmp_path / "run/3").mkdir(parents=True)
    (tmp_path / "run/.lock").touch()
    for name in ("tiny.pdparams", "tiny.pdopt"):
        (tmp_path / "run/3" / name).write_text("parameters")
    (tmp_path / "run/best").symlink_to("3")
    (tmp_path / "data/train").mkdir(parents=True)
    (tmp_path / "data/train/x.jpg").write_text("an image")
    (tmp_path / "link").symlink_to("data")
    (tmp_path / "copied").mkdir()
    for name in ("tiny.pdparams", "meta.json"):
        (tmp_path / "copied" / name).write_text("parameters")
    (tmp_path / "older").mkdir()
    for name in ("tiny.pdparams", "tiny.pdopt"):
        (tmp_path / "older" / name).write_text("parameters")
    (tmp_path / "free").mkdir()
    (tmp_path / "to_free").symlink_to("free")
    (tmp_path / "broken").symlink_to("nowhere")
    os.link(tmp_path / "data/train/x.jpg", tmp_path / "same")
    (tmp_path / "file").write_text("text")
    return tmp_path


def content(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_valid_outputs_are_accepted_and_not_created(root, capsys):
    before = content(root)
    outputs.claim(
        {"--a": root / "new/deep/a", "--b": root / "file", "--c": root / "run/report.json", "--d": None},
        {"--e": root / "new/e", "--f": root / "run", "--g": root / "to_free/new", "--h": root / "free"},
        inputs=[("IN", root / "nowhere"), ("IN", root / "data/train/x.jpg")],
        protected=[("the data set", root / "data")],
        run_folder=root / "run",
    )
    invalid = [("IN", "a\0b"), ("IN", "\ud800")]  # a hostile report, for example, can contain such paths
    outputs.claim({"--a": "/dev/null", "--b": "/dev/null"}, inputs=invalid)
    assert content(root) == before
    assert (
        capsys.readouterr().err
        == f"warning: --b {root}/file: replaces an existing file; choose a different path to keep it\n"
    )


@pytest.mark.parametrize(
    ("files", "folders", "message"),
    [
        (["new/a", "new/../new/a"], [], "--0 new/a"),
        (["link/a", "data/a"], [], "--0 link/a"),
        (["new/a"], ["new/a"], "the same file as --0 new/a"),
        (["same"], [], "the same file as IN data/train/x.jpg, which this command reads"),
        (["link/train/x.jpg"], [], "--0 link/train/x.jpg: would change the data set's data/train; choose"),
        (["link/train/new.csv"], [], "would change the data set's data/train; choose a path outside it"),
        ([], ["data/train/new"], "would change the data set's"),
        (["run/3/a"], [], "run/3 is reserved for a checkpoint; choose a path outside it"),
        (["run/best/tiny.pdparams"], [], "run/3 is reserved for a checkpoint"),
        ([], ["run/3/deep/er"], "run/3 is reserved for a checkpoint"),
        (["run/4/a"], [], "run/4 is reserved for a checkpoint"),
        (["run/latest"], [], "run/latest is reserved for a checkpoint"),
        ([], ["run/4_2"], "run/4_2 is reserved for a checkpoint"),
        (["copied/a"], [], "copied is reserved for a checkpoint"),
        (["older/a"], [], "older is reserved for a checkpoint"),
        (["free/images/a"], [], "--0 free/images/a: would change the images to_free/images; choose"),
        (["next/4/a"], [], "next/4 is reserved for a checkpoint"),
        (["file/a"], [], "--0 file/a: cannot be written (Not a directory); choose a different path"),
        (["data"], [], "--0 data: cannot be written (Is a directory)"),
        ([], ["file"], "--10 file: cannot be written (File exists)"),
        ([], ["broken"], "--10 broken: broken is a broken link; remove it, or choose a different path"),
        ([], ["broken/new"], "--10 broken/new: broken is a broken link"),
        (["n" * 300], [], "cannot be written (File name too long)"),
        (["-"], [], "--0 -: does not write to stdout; use a file name, or ./- for a file named -"),
        (["new/"], [], "--0 new/: names a folder; choose a file in it"),
        (["n" * 250], [], "cannot be written (File name too long)"),  # too long for the name of the incomplete file
        (["a\0b"], [], "--0 'a\\x00b': not a valid path (embedded null byte)"),
        (["pipe"], [], "--0 pipe: cannot be written (a pipe without a reader"),
        # The file can be written, but no file can be created next to it.
        (["/proc/self/comm"], [], "--0 /proc/self/comm: cannot be written (No such file or directory)"),
    ],
)
def test_harmful_outputs_are_rejected(root, work_in, files, folders, message):
    work_in(root)
    os.mkfifo(root / "pipe")
    before = content(root / "data") | content(root / "run")
    with pytest.raises(UsageError) as error:
        outputs.claim(
            {f"--{i}": path for i, path in enumerate(files)},
            {f"--{i}": path for i, path in enumerate(folders, 10)},
            inputs=[("IN", "data/train/x.jpg")],
            protected=[("the data set's", "data/train"), ("the images", "to_free/images")],
            run_folder="next",
        )
    assert message in str(error.value).replace(f"{root}/", "")
    assert content(root / "data") | content(root / "run") == before


def test_claim_does_not_close_pipe_of_reader(tmp_path):
    """If `claim` opened and closed the write end of the pipe, the reader would reach the end of the file."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    outputs.claim({"--csv": tmp_path / "pipe"})
    with pytest.raises(BlockingIOError):  # at the end of the file, the result would be b""
        os.read(reader, 1)
    os.close(reader)


def test_replaced_keeps_old_file_if_writing_fails(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    for path in ("link", "new"):
        with pytest.raises(OSError, match="full"), outputs.replaced(tmp_path / path) as partial:
            partial.write_text("half")
            raise OSError("disk full")
    assert (tmp_path / "link").read_text() == "old"
    with outputs.replaced(tmp_path / "link") as partial:
        partial.write_text("new")
    assert (tmp_path / "file").read_text() == "new" and (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]
    with outputs.replaced("/dev/null") as partial:
        assert str(partial) == "/dev/null"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a pipe without a reader"), outputs.replaced(tmp_path / "pipe"):
        pass
    with outputs.replaced(tmp_path / "folder/file") as partial:
        partial.write_text("new")
    assert (tmp_path / "folder/file").read_text() == "new"


@pytest.mark.parametrize("name", ["file", "link/file"])
def test_file_that_another_process_wrote_is_found_by_relative_and_linked_paths(tmp_path, work_in, capsys, name):
    work_in(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    outputs.claim({"figure": Path(name)})
    (tmp_path / "file").write_text("of another process")
    outputs.warn_if_changed(Path(name))
    assert "replaces the file that another process wrote" in capsys.readouterr().err


@pytest.mark.parametrize("before", ["", "old"])
def test_file_that_another_process_wrote_is_replaced_with_a_warning(tmp_path, capsys, before):
    path = tmp_path / "file"
    path.write_text(before)
    outputs.claim({"figure": path, "page": tmp_path / "page"})
    first = f"warning: figure {path}: replaces an existing file; choose a different path to keep it\n" if before else ""
    assert capsys.readouterr().err == first
    path.write_text("of another process")
    for is_warned in (True, False):
        with outputs.replaced(path) as partial:
            partial.write_text("new")
        err = capsys.readouterr().err
        assert err.startswith(f"warning: {path}: replaces the file that another process wrote") == is_warned
        assert err.count("\n") == is_warned and path.read_text() == "new"
    other, status = tmp_path / "other", path.stat()  # of the same size and time
    other.write_text("own")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(path)
    outputs.warn_if_changed(path)
    assert "replaces the file that another process wrote" in capsys.readouterr().err
    for text, times in (("new", (0, 0)), ("longer", (status.st_atime_ns, status.st_mtime_ns))):
        with outputs.replaced(path) as partial:
            partial.write_text("new")
            os.utime(partial, ns=(status.st_atime_ns, status.st_mtime_ns))
        capsys.readouterr()
        path.write_text(text)
        os.utime(path, ns=times)
        outputs.warn_if_changed(path)
        assert "replaces the file that another process wrote" in capsys.readouterr().err
    for text in ("new", "of another process"):  # files that were not claimed
        with outputs.replaced(tmp_path / "csv") as partial:
            partial.write_text("new")
        (tmp_path / "csv").write_text(text)
    assert capsys.readouterr().err == ""
    outputs.claim({"page": tmp_path / "page", "figure": path}, announced=["figure"])
    assert capsys.readouterr().err == ""
