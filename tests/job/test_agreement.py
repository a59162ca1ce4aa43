"""Comparison of settings between processes. test_jobs.py tests complete jobs whose processes have different
settings."""

from types import SimpleNamespace

import nvidia.dali
import paddle
import pytest
from paddle import static

from conftest import frozen
from paddle_resnet import dali, program
from paddle_resnet.job import agreement
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode


@pytest.fixture
def facts(monkeypatch):
    """Return a function that calls a given function of agreement.py and returns the values that the ranks compare."""
    compared = []
    monkeypatch.setattr(agreement, "_compare", compared.append)

    def facts(function, *args):
        function(*args)
        return compared.pop()

    return facts


def test_equal_settings_pass():
    agreement._check_equal([{"--lr": 0.1, "--image-shape": [3, 32, 32]}] * 3)


def test_error_lists_each_difference_with_its_ranks():
    with pytest.raises(UsageError) as e:
        agreement._check_equal([{"--lr": 1, "--asp": True}, {"--lr": 2, "--asp": True}, {"--lr": 1}])
    assert "--lr is 1 on ranks 0, 2 and 2 on rank 1, --asp is True on ranks 0, 1 and None on rank 2; start" in str(
        e.value
    )


def test_value_that_rank_0_lacks_is_a_difference():
    with pytest.raises(
        UsageError, match="^job: the processes differ: --asp is None on rank 0 and True on rank 1; start"
    ):
        agreement._check_equal([{"--lr": 1}, {"--lr": 1, "--asp": True}])


def test_flags_for_paths_and_speed_may_differ(facts, parse):
    first = facts(
        agreement.check_start, parse("--image-root", "a", "--dali-num-threads", "3", "--report-file", "b").as_entry()
    )
    assert first == facts(agreement.check_start, parse().as_entry())
    local = {"--image-root", "--skip-list", "--allow-outside", "--report-file", "--show-config", "--verbose"}
    local |= {"--enable-cpu-affinity", "--dali-num-threads", "--dali-prefetch", "--hw-decoder-load"}
    assert not local & set(first)
    # A checkpoint may replace a default value, but not a flag that was set explicitly to the same value.
    for seed in ("7", "42"):
        other = facts(agreement.check_start, parse("--dali-random-seed", seed).as_entry())
        assert {name for name in first if first[name] != other[name]} == {"--dali-random-seed"}
        assert (first["--dali-random-seed"], other["--dali-random-seed"]) == ("42 (default)", int(seed))


def test_kernels_missing_on_one_machine_raise_with_remedy(facts):
    main = static.Program()
    all_ranks = [facts(agreement.check_work, kernels, None, None, main) for kernels in ("native", "paddle")]
    with pytest.raises(
        UsageError, match="paddle runs on every machine. is native on rank 0 and paddle on rank 1; start"
    ):
        agreement._check_equal(all_ranks)


def test_source_code_is_compared(facts, parse, monkeypatch):
    first = facts(agreement.check_start, parse().as_entry())
    assert (first["Paddle version"], first["DALI version"]) == (paddle.__version__, nvidia.dali.__version__)
    sources = agreement._sources()
    assert {path.rpartition(".")[2] for path in sources} == {"py", "cc", "h", "cu", "cuh"}
    assert {f"paddle_resnet/{name}.py" for name in ("train", "config", "models/resnet", "utils/meters")} <= set(sources)
    monkeypatch.setattr(agreement, "_sources", lambda: {**sources, "paddle_resnet/train.py": ""})
    other = facts(agreement.check_start, parse().as_entry())
    assert {name for name in first if first[name] != other[name]} == {"source code of this program (hash)"}
    monkeypatch.setattr(agreement.user_file, "sha256", lambda name: name)
    first, other, name = other, facts(agreement.check_start, parse().as_entry()), "file of --model-arch-name (hash)"
    assert {name for name in first if first[name] != other[name]} == {name}


@pytest.mark.parametrize(
    ("parameters", "different"),
    [
        ([("a", [2, 3], "float32")], set()),
        ([("a", [3, 2], "float32")], {"shapes of the parameters (hash)"}),
        ([("a", [2, 3], "float16")], {"shapes of the parameters (hash)"}),
        ([("b", [2, 3], "float32")], {"shapes of the parameters (hash)"}),
        (
            [("a", [2, 3], "float32"), ("b", [1], "float32")],
            {"shapes of the parameters (hash)", "number of parameters"},
        ),
    ],
)
def test_names_shapes_and_types_of_parameters_are_compared(facts, parameters, different):
    """Synthetic images have neither classes nor a digest."""

    def work(parameters):
        main, loader = static.Program(), SimpleNamespace(data_set_size=9, digest=None, classes=())
        for name, shape, dtype in parameters:
            main.global_block().create_parameter(name=name, shape=shape, dtype=dtype)
        return facts(agreement.check_work, "paddle", None, loader, main)

    first, other = work([("a", [2, 3], "float32")]), work(parameters)
    assert {name for name in first if first[name] != other[name]} == different
    assert first["list of validation images and labels (hash)"] is None


@pytest.mark.slow
def test_image_lists_classes_and_parameter_shapes_are_compared(facts, parse, photos, tmp_path):
    def work(*flags, classes=None):
        args = parse("--image-root", photos, *flags)
        loaders = [dali.build_dataloader(args, mode) for mode in (Mode.TRAIN, Mode.EVAL)]
        for loader in loaders:
            loader.classes = classes or loader.classes
        main = static.Program()
        program.build(frozen(args), main, static.Program(), len(loaders[0]))
        return facts(agreement.check_work, args.kernels, *loaders, main)

    first = work()
    assert first["number of steps per epoch"] == 3
    assert first["number of training images"] == 30
    assert first["number of validation images"] == 23
    assert {len(value) for name, value in first.items() if "(hash)" in name} == {8}
    assert first == work()
    (tmp_path / "list").write_text("val/class0/00.jpg\n")
    other = work("--skip-list", tmp_path / "list")
    hashes = {"list of validation images and labels (hash)", "number of validation images"}
    assert {name for name in first if first[name] != other[name]} == hashes
    other = work(classes=["class0", "class1", "another"])
    hashes = {f"list of {name} classes (hash)" for name in ("training", "validation")}
    assert {name for name in first if first[name] != other[name]} == hashes
    other = work(classes=["class1", "class0", "class2"])
    assert {name for name in first if first[name] != other[name]} == hashes
    other = work("--num-of-class", "4")
    assert {name for name in first if first[name] != other[name]} == {"shapes of the parameters (hash)"}
