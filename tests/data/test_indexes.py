import gzip
import io
import os
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

from paddle_resnet.data import indexes
from paddle_resnet.data.formats import FORMATS, INDEXED, SHARDED, SINGLE_FILE, recordio, tfrecord, webdataset
from paddle_resnet.utils import files
from paddle_resnet.utils.errors import UsageError

pytestmark = pytest.mark.usefixtures("cache")
KINDS = {"tfrecord": "train-00000-of-00001", "recordio": "train.rec", "webdataset": "train-000000.tar"}


def write(folder, kind, count=5):
    """Write a record file with `count` images of different lengths and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / KINDS[kind]
    images = [(bytes([i]) * (100 + i), i) for i in range(count)]
    if kind == "recordio":
        with SINGLE_FILE[kind](str(folder), "train") as writer:
            writer.write(images)
            writer.finish()
        os.unlink(folder / "train.idx")
    else:
        with SHARDED[kind](str(path)) as writer:
            for number, (image, label) in enumerate(images):
                writer(number, image, "jpg", label)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_index_lists_every_record_and_only_that_of_a_tar_shard_is_in_the_cache(tmp_path, cache, kind):
    """Hugging Face's `datasets` would take an index next to a tar shard for a shard, and refuse the folder."""
    shard = write(tmp_path / "data", kind)
    index = indexes.open_index(str(shard), INDEXED[kind])
    names = [shard.name]
    if kind == "webdataset":
        assert index.path.startswith(str(cache / "paddle_resnet/indexes"))
    else:
        assert index.path == indexes.index_path(str(shard))
        names.append(os.path.basename(index.path))
    assert sorted(os.listdir(tmp_path / "data")) == sorted(names)
    with open(shard, "rb") as f:
        labels = [FORMATS[kind].read_label(f, offset, size) for offset, size in index.labels.tolist()]
    assert labels == [0, 1, 2, 3, 4]


def test_name_of_index_follows_suffix_of_shard():
    for shard, name in (
        ("a/val.rec", "a/val.idx"),
        ("val-000000.tar", "val-000000.idx"),
        ("val-00000-of-00002", "val-00000-of-00002.idx"),
        ("val-00000-of-00002.tfrecord", "val-00000-of-00002.tfrecord.idx"),
    ):
        assert indexes.index_path(shard) == name


def block_index(shard, kind="tfrecord"):
    """Put a folder in place of the temporary file, so that the next attempt to write an index at the preferred place
    fails. A read-only parent folder would not suffice, because root could write to it."""
    files.partial_path(indexes.index_paths(str(shard), INDEXED[kind])[0]).mkdir(parents=True)


@pytest.mark.parametrize("kind", KINDS)
def test_index_is_written_to_second_place_if_first_is_not_writable(tmp_path, capsys, kind):
    shard = write(tmp_path / "data", kind)
    preferred, other = indexes.index_paths(str(shard), INDEXED[kind])
    block_index(shard, kind)
    index = indexes.open_index(str(shard), INDEXED[kind])
    assert index.path == other
    assert index.path in capsys.readouterr().out
    assert not os.path.exists(preferred)
    assert len(index) == 5
    # The existing index is used and not written again.
    written = os.stat(index.path).st_mtime_ns
    assert indexes.open_index(str(shard), INDEXED[kind]).path == index.path
    assert os.stat(index.path).st_mtime_ns == written and capsys.readouterr().out == ""
    Path(preferred).write_bytes(Path(index.path).read_bytes())
    assert indexes.open_index(str(shard), INDEXED[kind]).path == indexes.index_path(str(shard))


def test_cached_index_of_changed_shard_is_not_used(tmp_path, cache):
    shard = write(tmp_path / "data", "tfrecord")
    block_index(shard)
    first = indexes.open_index(str(shard), INDEXED["tfrecord"])
    write(tmp_path / "data", "tfrecord", count=7)
    block_index(shard)
    second = indexes.open_index(str(shard), INDEXED["tfrecord"])
    assert len(second) == 7
    os.utime(shard, ns=(0, 0))
    block_index(shard)
    third = indexes.open_index(str(shard), INDEXED["tfrecord"])
    (tmp_path / "link").symlink_to("data")
    assert indexes._cached_index_path(str(tmp_path / "link" / shard.name)) == third.path
    (tmp_path / os.fsdecode(b"\xe9")).touch()
    assert indexes._cached_index_path(str(tmp_path / os.fsdecode(b"\xe9"))).endswith(".idx")
    assert len({first.path, second.path, third.path}) == 3  # the cache identifies shards by size and modification time


def test_equal_shards_in_different_folders_have_their_own_cached_index(tmp_path, cache):
    shards = [write(tmp_path / name, "recordio") for name in "ab"]
    for shard in shards:
        os.utime(shard, ns=(0, 0))
    assert len({indexes._cached_index_path(str(shard)) for shard in shards}) == 2


def test_unwritable_folder_and_cache_are_an_error(tmp_path, cache):
    shard = write(tmp_path / "data", "tfrecord")
    cache.write_text("a file")
    block_index(shard)
    with pytest.raises(UsageError, match=r"neither .*train.*\(Is a dir.*\) nor .*/cache/.* \(Not a directory\) can"):
        indexes.open_index(str(shard), INDEXED["tfrecord"])


@pytest.mark.parametrize("count", [2, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_index_of_different_shard_is_rejected(tmp_path, kind, count):
    shard = write(tmp_path, kind)
    stale = Path(indexes.open_index(str(shard), INDEXED[kind]).path).read_bytes()
    shard.unlink()
    write(tmp_path, kind, count=count)
    Path(indexes.index_path(str(shard))).write_bytes(stale)
    with pytest.raises(UsageError, match="does not match .*; remove this index"):
        indexes.open_index(str(shard), INDEXED[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["", "nonsense", "v1.1 5\n", "v1.1 0\n", "1 2 3\n", "v2 1\njpg 512 3 cls 1536 3\n"])
def test_index_of_unknown_format_is_rejected(tmp_path, kind, text):
    shard = write(tmp_path, kind)
    with open(indexes.index_path(str(shard)), "w") as f:
        f.write(text)
    with pytest.raises(UsageError, match="does not match .*; remove this index"):
        indexes.open_index(str(shard), INDEXED[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [0.4, 0.9])
def test_truncated_shard_is_rejected(tmp_path, kind, keep):
    shard = write(tmp_path, kind)
    data = shard.read_bytes()
    if kind == "webdataset":
        data = data[: data.rindex(b"4") + 1]  # remove the trailing zeros
    shard.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(UsageError, match=f"{shard}: damaged"):
        indexes.open_index(str(shard), INDEXED[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_shard_with_damaged_header_is_rejected(tmp_path, kind):
    shard = write(tmp_path, kind)
    shard.write_bytes(b"\xff" * 40 + shard.read_bytes()[40:])
    place = {"tfrecord": r"at byte 0 \(no record starts at this position\);", "recordio": "at byte 0;"}.get(kind, "")
    with pytest.raises(UsageError, match=f"{shard}: damaged {place}"):
        indexes.open_index(str(shard), INDEXED[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_empty_shard_is_rejected(tmp_path, kind):
    shard = write(tmp_path, kind, count=0)
    with pytest.raises(UsageError, match="contains no records"):
        indexes.open_index(str(shard), INDEXED[kind])


def test_index_without_skipped_images_keeps_format_v1_2(tmp_path, cache):
    """In version 1.2 of the index format, the name of each file follows its extension, offset and size."""
    shard = str(write(tmp_path, "webdataset"))
    first = indexes.open_index(shard, INDEXED["webdataset"])
    head, *lines = Path(first.path).read_text().splitlines()
    columns = [line.split() for line in lines]
    lines = [" ".join(f"{e} {o} {s} x.{e}" for e, o, s in zip(w[::3], w[1::3], w[2::3], strict=True)) for w in columns]
    Path(first.path).write_text("\n".join([head.replace("v1.1", "v1.2"), *lines]) + "\n")
    assert indexes.open_index(shard, INDEXED["webdataset"]).images.tolist() == first.images.tolist()
    remaining = indexes.open_index(shard, INDEXED["webdataset"], frozenset({int(first.images[0, 0])}))
    assert remaining.images.tolist() == first.images[1:].tolist()
    assert remaining.labels.tolist() == first.labels[1:].tolist()
    assert Path(remaining.path).read_text().splitlines() == ["v1.2 4", *lines[1:]]
    message = f"{shard}: no record at byte 3; remove train-000000.tar@3 from --skip-list"
    with pytest.raises(UsageError, match=message):
        indexes.open_index(shard, INDEXED["webdataset"], frozenset({7, 3, int(first.images[0, 0])}))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("kind", "line"), [("tfrecord", "{start} {size}\n"), ("recordio", "{row}\t{start}\n")])
def test_index_without_skipped_records_has_the_format_of_dali(tmp_path, kind, line):
    index = indexes.open_index(str(write(tmp_path, kind)), INDEXED[kind])
    remaining = indexes.open_index(str(tmp_path / KINDS[kind]), INDEXED[kind], frozenset({int(index.images[1, 0])}))
    rows = enumerate(index.images[[0, 2, 3, 4]].tolist())
    expected = [line.format(row=row, start=start, size=size) for row, (start, size) in rows]
    assert Path(remaining.path).read_text() == "".join(expected)


def tar(path, names):
    with tarfile.open(path, "w") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 3
            archive.addfile(info, io.BytesIO(b"123"))
    return str(path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.jpg"], "has the extensions jpg, but needs an image"),
        (["a.cls"], "has the extensions cls, but"),
        (
            ["a.jpg", "b.jpg", "b.cls", "a.cls"],
            "2 of 3 samples without image or label and write the shard again with the files of each sample next to",
        ),
        (["a.jpg", "a.json"], "needs an image and a .cls file; run `"),
        (["a.jpg", "a.cls", "b.txt", "b.cls"], "has the extensions txt, cls, but"),
    ],
)
def test_sample_without_image_or_class_is_rejected(tmp_path, names, message):
    with pytest.raises(UsageError, match="the sample at byte") as error:
        indexes.open_index(tar(tmp_path / "train-0.tar", names), INDEXED["webdataset"])
    assert all(part in str(error.value) for part in message.split(" and "))


def test_dots_in_keys_are_reported_with_at_most_5_names(tmp_path):
    names = [f"img.v2.{number:06d}.{extension}" for number in range(500) for extension in ("jpg", "cls")]
    with pytest.raises(UsageError) as error:
        indexes.open_index(tar(tmp_path / "train-0.tar", names), INDEXED["webdataset"])
    extensions = "v2.000000.jpg, v2.000000.cls, v2.000001.jpg, v2.000001.cls, v2.000002.jpg and 995 more"
    assert f" has the extensions {extensions}, but needs an image" in str(error.value)
    remedy = "write the shard again with keys that contain no dots, because a key ends at its first dot"
    assert "1 of 1 sample without image or label: " in str(error.value)
    assert str(error.value).endswith(f"; {remedy}")
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("kind", KINDS)
def test_compressed_shard_is_reported_with_remedy(tmp_path, kind):
    shard = write(tmp_path / "a b", kind)
    content = shard.read_bytes()
    shard.write_bytes(gzip.compress(content))
    with pytest.raises(
        UsageError, match="compressed with gzip, which DALI does not support; run `gzip -dc < "
    ) as error:
        indexes.open_index(str(shard), INDEXED[kind])
    subprocess.run(str(error.value).split("`")[1], shell=True, check=True)
    assert shard.read_bytes() == content
    assert len(indexes.open_index(str(shard), INDEXED[kind])) == 5


def header(name, size, kind=tarfile.REGTYPE):
    """Encode the header of a tar member. Members of type GNUTYPE_SPARSE get 0 as the size of the original file."""
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def test_tar_member_of_negative_size_is_rejected(tmp_path):
    """tarfile reads a size of -1 like a size of 0."""
    path = tmp_path / "train.tar"
    path.write_bytes(header("0.jpg", -1) + bytes(1024))
    with pytest.raises(UsageError, match="the size at byte 0 is negative"):
        indexes.scan(str(path), INDEXED["webdataset"])
    with pytest.raises(ValueError, match="^$"):
        webdataset._check_between(io.BytesIO(header("README", -256) + bytes(2048)), 0, None)


def test_tar_position_that_does_not_advance_is_rejected(tmp_path, monkeypatch):
    """The test simulates tarfile, which repeats a member forever if the member makes the position move backward."""

    class Archive(tarfile.TarFile):
        def __iter__(self):
            for member in super().__iter__():
                yield member
                self.offset = 512 if member.name == "b.jpg" else self.offset
                yield member

    shard = tar(tmp_path / "train-0.tar", ["a.cls", "b.jpg"])
    monkeypatch.setattr(webdataset.tarfile, "open", Archive.open)
    with pytest.raises(UsageError, match="the size at byte 0 is negative"):
        indexes.scan(shard, INDEXED["webdataset"])


@pytest.mark.parametrize("kind", [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_folders_and_links_in_a_tar_file_have_no_data(kind):
    webdataset._check_between(io.BytesIO(header("x", 600, kind) + bytes(1024)), 0, None)


@pytest.mark.parametrize("name", ["a.j pg", "a. "])
def test_tar_member_with_space_in_extension_is_rejected(tmp_path, name):
    with pytest.raises(UsageError, match="the extension of 'a.* contains a space"):
        indexes.scan(tar(tmp_path / "train-0.tar", [name, "a.cls"]), INDEXED["webdataset"])


@pytest.mark.parametrize(("old", "new"), [("jpg 512 3", "jpg 512 2"), ("1536 3\n", "1536 3 x\n"), ("v1.1 1", "v1.1 2")])
def test_tar_index_with_wrong_size_or_additional_field_is_rejected(tmp_path, old, new):
    shard = tar(tmp_path / "train-0.tar", ["a.jpg", "a.cls"])
    index = Path(indexes.open_index(shard, INDEXED["webdataset"]).path)
    assert index.read_text() == "v1.1 1\njpg 512 3 cls 1536 3\n"
    index.write_text(index.read_text().replace(old, new))
    with pytest.raises(UsageError, match="does not match"):
        indexes.open_index(shard, INDEXED["webdataset"])


def test_tar_index_of_a_link_is_rejected(tmp_path):
    label = header("a.cls", 1) + b"7".ljust(512, b"\0") + bytes(1024)
    for kind in (tarfile.REGTYPE, tarfile.SYMTYPE):
        file = io.BytesIO(header("a.jpg", 0, kind) + label)
        file.name = "train-0.tar"
        rows = b"v1.1 1\njpg 512 0 cls 1024 1\n", file, len(file.getvalue())
        if kind == tarfile.REGTYPE:
            assert [part.tolist() for part in webdataset._rows(*rows)] == [[[512, 0]], [[1024, 1]]]
        else:
            with pytest.raises(ValueError, match="^$"):
                webdataset._rows(*rows)


def test_tar_member_of_enormous_size_does_not_match_the_index(tmp_path, work_in):
    (tmp_path / "a.tar").write_bytes(header("README", 2**70) + header("a.jpg", 0) + header("a.cls", 0) + bytes(1024))
    (tmp_path / "a.idx").write_text("v1.1 1\njpg 1024 0 cls 1536 0\n")
    work_in(tmp_path)
    for path, folder in ((f"{tmp_path}/a.tar", tmp_path), ("a.tar", r"\.")):
        with pytest.raises(UsageError, match=f"a.idx: does not match {path}; .* index {folder}`$"):
            indexes.open_index(path, INDEXED["webdataset"])


def test_checked_records_are_evenly_spaced():
    assert [indexes.spread(count, 3) for count in (1, 2, 3, 7)] == [[0], [0, 1], [0, 1, 2], [0, 3, 6]]


def test_numbers_in_an_index_are_limited():
    assert indexes.numbers([b"9" * 18], None).tolist() == [10**18 - 1]
    assert indexes.numbers([b"5"], 5).tolist() == [5]
    for texts, limit in (([b"1" * 19, b"9"], None), ([b"6", b"5"], 5), ([b"-1"], None)):
        with pytest.raises(ValueError, match="^$"):
            indexes.numbers(texts, limit)


@pytest.mark.parametrize(
    "data", [b"0 16\n16 117\n", b"1 17\n18 115\n", b"0 17\n18 115\n", b"0 17\n17 115\n", b"0 18\n17 116\n"]
)
def test_tfrecord_index_must_list_every_record_with_payload(data):
    assert tfrecord._rows(b"0 17\n17 116\n", None, 133)[0].tolist() == [[0, 17], [17, 116]]
    with pytest.raises(ValueError, match="^$"):
        tfrecord._rows(data, None, 133)


def test_index_for_skip_list_that_cannot_be_written_is_an_error(tmp_path, cache):
    shard = str(write(tmp_path, "recordio"))
    cache.write_text("no folder")
    problem = "the index for --skip-list cannot be written .Not a directory.; make the folder writable"
    with pytest.raises(UsageError, match=f"^{cache}/.*: {problem}$"):
        indexes.open_index(shard, INDEXED["recordio"], frozenset([0]))


@pytest.mark.usefixtures("cache")
def test_tar_may_contain_folders_long_names_hidden_files_and_other_members(tmp_path):
    long = f"folder/{'x' * 150}"
    names = [
        "dir/.hidden.jpg",
        "dir/a.b.json",
        "dir/a.JPG",
        os.fsdecode(b"dir/a.\xe9"),
        "dir/a.cls",
        f"{long}.png",
        f"{long}.cls",
    ]
    path = tar(tmp_path / "train-0.tar", ["dir/a.json", *names[:5], "other/a.jpg", "other/a.cls", *names[5:], "README"])
    index = indexes.open_index(path, INDEXED["webdataset"])
    with open(path, "rb") as f:
        assert [webdataset.read_label(f, *record) for record in index.labels.tolist()] == [123] * 3
    skipped = int(index.images[1, 0])
    assert (
        indexes.open_index(path, INDEXED["webdataset"], frozenset({skipped})).images.tolist()
        == index.images[::2].tolist()
    )
    with pytest.raises(UsageError, match="has the extensions \ufffd, cls, but needs an image"):
        indexes.open_index(tar(tmp_path / "val-0.tar", [os.fsdecode(b"a.\xe9"), "a.cls"]), INDEXED["webdataset"])


@pytest.mark.parametrize(
    ("name", "kind", "is_sample_file"),
    [
        ("a.b/c.jpg", tarfile.REGTYPE, True),
        ("a.b/c.jpg", tarfile.SYMTYPE, False),
        ("a.b", tarfile.DIRTYPE, False),
        ("a.b/c", tarfile.REGTYPE, False),
        ("a.b/.jpg", tarfile.REGTYPE, False),
        ("a.", tarfile.REGTYPE, False),
    ],
)
def test_only_regular_files_with_extension_belong_to_samples(name, kind, is_sample_file):
    member = tarfile.TarInfo(name)
    member.type = kind
    assert webdataset._is_sample_file(member) is is_sample_file


def test_compressed_archive_or_archive_that_ends_early_is_rejected(tmp_path):
    with tarfile.open(tmp_path / "train-0.tar", "w:gz") as archive:
        archive.add(__file__, "a.jpg")
    with pytest.raises(UsageError, match="train-0.tar: compressed with gzip"):
        indexes.scan(str(tmp_path / "train-0.tar"), INDEXED["webdataset"])
    with pytest.raises(tarfile.TarError):  # a block of zeros ends an archive, so readers ignore what follows
        webdataset._check_between(io.BytesIO(bytes(512) + header("a.jpg", 0)), 0, 1024)


def test_first_image_of_a_tar_sample_is_used(tmp_path):
    path = tar(tmp_path / "train-0.tar", ["a.jpg", "a.png", "a.cls", "b.cls", "b.png"])
    index = indexes.open_index(path, INDEXED["webdataset"])
    # Each file occupies a header and a block of 512 bytes.
    assert index.images[:, 0].tolist() == [512, 512 + 4 * 1024]
    assert index.labels[:, 0].tolist() == [512 + 2 * 1024, 512 + 3 * 1024]


def test_recordio_index_in_different_order_is_sorted(tmp_path):
    shard = write(tmp_path, "recordio")
    index = indexes.open_index(str(shard), INDEXED["recordio"])
    lines = Path(index.path).read_text().splitlines(keepends=True)
    Path(index.path).write_text("".join(reversed(lines)))
    again = indexes.open_index(str(shard), INDEXED["recordio"])
    assert again.images.tolist() == index.images.tolist()


def test_recordio_index_without_a_row_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(recordio, "CHECKED_RECORDS", 2)
    shard = write(tmp_path, "recordio")
    index = Path(indexes.open_index(str(shard), INDEXED["recordio"]).path)
    lines = index.read_text().splitlines(keepends=True)
    repeated = f"2\t{lines[1].split()[1]}\n"
    without_first = [f"{key}\t{line.split()[1]}\n" for key, line in enumerate(lines[1:])]
    for damaged in ([*lines[:2], *lines[3:]], [*lines[:2], repeated, *lines[3:]], without_first):
        index.write_text("".join(damaged))
        with pytest.raises(UsageError, match="idx: does not match"):
            indexes.open_index(str(shard), INDEXED["recordio"])
    index.write_text("".join(lines))
    ends, recordio_end = [], recordio.record_end
    monkeypatch.setattr(recordio, "record_end", lambda *place: ends.append(place[1]) or recordio_end(*place))
    rows = indexes.open_index(str(shard), INDEXED["recordio"]).images
    assert ends == [rows[0, 0], rows[-1, 0]]  # if no row is missing, checking a few records suffices


def test_write_file_is_atomic(tmp_path, monkeypatch):
    path, calls = tmp_path / "x.idx", []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: calls.append(os.fstat(file).st_size) or fsync(file))
    monkeypatch.setattr(os, "replace", lambda *names: calls.append("replace") or replace(*names))
    indexes.write_file(str(path), b"data")
    assert calls == [4, "replace"]  # all bytes are flushed before the file is renamed
    assert path.read_bytes() == b"data"
    assert stat.S_ISREG(path.stat().st_mode)
    with pytest.raises(TypeError):
        indexes.write_file(str(path), "no bytes")
    assert path.read_bytes() == b"data"
    assert [p.name for p in tmp_path.iterdir()] == ["x.idx"]
