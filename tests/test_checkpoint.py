import json
import pickle

import numpy as np
import paddle
import pytest
from paddle import static

from paddle_resnet import checkpoint
from test_program import build, random_batches, variable
from utils.errors import UsageError

PLACE = paddle.CPUPlace()


@pytest.fixture
def args(parse, tmp_path):
    return parse("--output-dir", tmp_path, "--lr", "0.01", "--epochs", "3")


@pytest.fixture
def saved(args):
    """A checkpoint of epoch 4 after two steps; returns (folder, {variable: value}, lr_scheduler)."""
    compiled, exe, _, lr_scheduler, main = build(args)
    for images, labels in random_batches(2):
        exe.run(compiled, {"data": images, "label": labels})
        lr_scheduler.step()
    folder = checkpoint.save(args, main, 4, lr_scheduler)
    state = {v.name: variable(v.name) for v in main.list_vars() if v.persistable}
    return folder, state, lr_scheduler


def resume(args, folder, *, epoch=None, seed=7):
    args.from_checkpoint, args.last_epoch_of_checkpoint = str(folder), epoch
    with static.scope_guard(static.Scope()):
        compiled, exe, fetchs, lr_scheduler, main = build(args, seed=seed)
        start = checkpoint.load(args, main, lr_scheduler, PLACE)
        state = {v.name: variable(v.name) for v in main.list_vars() if v.persistable}
    return start, state, lr_scheduler


def test_layout(args, saved, tmp_path):
    folder, _, _ = saved
    assert folder == tmp_path / "Tiny" / "4"
    assert sorted(p.name for p in folder.iterdir()) == ["meta.json", "tiny.pdopt", "tiny.pdparams"]
    assert [p.name for p in (tmp_path / "Tiny").iterdir()] == ["4"]
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["epoch"] == 4
    assert meta["arch"] == "Tiny"


def test_everything_comes_back_bit_for_bit(args, saved):
    folder, expected, lr_scheduler = saved
    start, state, restored = resume(args, folder.parent, epoch=4)
    assert start == 5
    assert state.keys() == expected.keys()
    assert any("velocity" in name and value.any() for name, value in expected.items())
    for name, value in expected.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)
    assert restored.state_dict() == lr_scheduler.state_dict()


def test_paddle_static_load_reads_it(args, saved):
    folder, expected, _ = saved
    with static.scope_guard(static.Scope()):
        _, exe, _, _, main = build(args, seed=7)
        static.load(main, str(folder / "tiny"), exe)
        for name, value in expected.items():
            np.testing.assert_array_equal(variable(name), value, err_msg=name)


def test_checkpoint_of_paddle_static_save_is_read(args, saved, tmp_path):
    folder, expected, _ = saved
    _, _, _, _, main = build(args, seed=3)
    for name, value in expected.items():
        static.global_scope().find_var(name).get_tensor().set(value, PLACE)
    static.save(main, str(tmp_path / "old" / "tiny"))
    start, state, _ = resume(args, tmp_path / "old")
    assert start == 0
    for name, value in expected.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)


def test_saving_again_replaces_the_epoch(args, saved):
    folder, _, lr_scheduler = saved
    _, _, _, _, main = build(args, seed=9)
    (folder.parent / ".4.partial").mkdir()
    assert checkpoint.save(args, main, 4, lr_scheduler) == folder
    assert sorted(p.name for p in folder.parent.iterdir()) == ["4"]
    params = pickle.loads((folder / "tiny.pdparams").read_bytes())
    np.testing.assert_array_equal(params["conv2d_0.w_0"], variable("conv2d_0.w_0"))


@pytest.mark.parametrize(
    ("below", "epoch", "start"),
    [("", "auto", 11), ("", 4, 5), ("", 10, 11), ("4", None, 0), ("4", 4, 5), ("4", "auto", 5)],
)
def test_find(args, saved, below, epoch, start):
    folder, _, lr_scheduler = saved
    _, _, _, _, main = build(args)
    checkpoint.save(args, main, 10, lr_scheduler)
    (folder.parent / "11").mkdir()  # no files: not a checkpoint
    args.from_checkpoint, args.last_epoch_of_checkpoint = str(folder.parent / below), epoch
    found, start_epoch = checkpoint.find(args)
    assert start_epoch == start
    assert found == folder.parent / (below or str(start - 1))


@pytest.mark.parametrize(
    ("below", "epoch", "message"),
    [
        ("nowhere", None, "--from-checkpoint .*nowhere does not exist: name"),
        ("Tiny", None, r"has no tiny.pdparams; it holds epochs \[4\]: add --last-epoch-of-checkpoint"),
        ("Tiny", 3, r"--last-epoch-of-checkpoint 3: .* give one of \[4\]"),
        ("Tiny/4", 3, "--last-epoch-of-checkpoint 3"),
        ("", "auto", "--last-epoch-of-checkpoint auto"),
    ],
)
def test_missing_checkpoint_is_refused(args, saved, tmp_path, below, epoch, message):
    args.from_checkpoint, args.last_epoch_of_checkpoint = str(tmp_path / below), epoch
    with pytest.raises(UsageError, match=message):
        checkpoint.find(args)


def test_other_prefix_is_named(args, saved):
    args.model_prefix = "other"
    args.from_checkpoint, args.last_epoch_of_checkpoint = str(saved[0].parent), "auto"
    with pytest.raises(UsageError, match="other.pdparams.*--model-prefix"):
        checkpoint.find(args)


def test_other_model_is_refused(args, saved):
    args.from_checkpoint = str(saved[0])
    args.model_arch_name = "ResNet18"
    _, _, _, lr_scheduler, main = build(args)
    with pytest.raises(
        UsageError, match=r"another model: .* missing .* of another shape .* --model-arch-name \(now ResNet18"
    ):
        checkpoint.load(args, main, lr_scheduler, PLACE)


def test_other_class_count_is_refused(args, saved):
    args.from_checkpoint = str(saved[0])
    args.num_of_class = 4
    _, _, _, lr_scheduler, main = build(args)
    with pytest.raises(
        UsageError, match=r"linear_0.w_0 is \[256, 3\], not \[256, 4\]|linear_0.b_0 is \[3\], not \[4\]"
    ):
        checkpoint.load(args, main, lr_scheduler, PLACE)


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"not a pickle", lambda data: b""]
)
def test_damaged_file_is_refused(args, saved, damage):
    path = saved[0] / "tiny.pdparams"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UsageError, match=r"tiny.pdparams is damaged"):
        resume(args, saved[0])


def test_missing_optimizer_file_is_refused(args, saved):
    (saved[0] / "tiny.pdopt").unlink()
    with pytest.raises(UsageError, match=r"tiny.pdopt cannot be read"):
        resume(args, saved[0])


def test_resume_without_schedule_is_refused(args, saved):
    (saved[0] / "meta.json").unlink()
    with pytest.raises(UsageError, match=r"has no meta.json.*--last-epoch-of-checkpoint None"):
        resume(args, saved[0].parent, epoch=4)


def test_evaluation_program_takes_the_parameters_alone(args, saved):
    folder, expected, _ = saved
    args.from_checkpoint = str(folder)
    with static.scope_guard(static.Scope()):
        _, _, _, _, main = build(args, is_train=False, seed=7)
        checkpoint.load(args, main, None, PLACE)
        for parameter in main.all_parameters():
            np.testing.assert_array_equal(variable(parameter.name), expected[parameter.name])


@pytest.mark.parametrize("form", ["folder", "file", "prefix"])
def test_pretrained_parameters(args, saved, form):
    folder, expected, _ = saved
    given = {"folder": folder, "file": folder / "tiny.pdparams", "prefix": folder / "tiny"}[form]
    args.from_pretrained_params = str(given)
    with static.scope_guard(static.Scope()):
        _, _, _, _, main = build(args, seed=7)
        checkpoint.load_pretrained(args, main, PLACE)
        np.testing.assert_array_equal(variable("conv2d_0.w_0"), expected["conv2d_0.w_0"])
        assert not any(variable(v.name).any() for v in main.list_vars() if "velocity" in v.name)


def test_missing_pretrained_parameters_are_refused(args, tmp_path):
    args.from_pretrained_params = str(tmp_path / "nothing")
    _, _, _, _, main = build(args)
    with pytest.raises(UsageError, match="--from-pretrained-params .*nothing"):
        checkpoint.load_pretrained(args, main, PLACE)


def test_float16_parameters_are_saved_from_their_float32_masters(args, monkeypatch):
    """As in a run with --use-pure-fp16, which needs a GPU: the file holds what an evaluation in float32 loads."""
    _, _, _, lr_scheduler, main = build(args)
    name = "conv2d_0.w_0"
    master = variable(name)
    main.global_block().create_var(name=name + "_fp32_master_0", shape=master.shape, dtype="float32", persistable=True)
    static.global_scope().var(name + "_fp32_master_0").get_tensor().set(master, PLACE)
    static.global_scope().find_var(name).get_tensor().set(master.astype("float16"), PLACE)
    folder = checkpoint.save(args, main, 0, lr_scheduler)
    saved = pickle.loads((folder / "tiny.pdparams").read_bytes())[name]
    assert saved.dtype == np.float32
    np.testing.assert_array_equal(saved, master)
