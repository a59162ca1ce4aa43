"""Loading and saving parameters and optimizer state."""

import dataclasses
import pickle
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import static

from helpers import META, build, random_batches, variable
from paddle_resnet.checkpoints import contents, folders, restore, variables
from paddle_resnet.step import facts, scalars
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import RunScope

pytestmark = pytest.mark.usefixtures("one_block")

PLACE = paddle.CPUPlace()


@pytest.fixture
def args(parse):
    return parse("--lr", "0.01")


@pytest.fixture
def saved(args, tmp_path):
    """Run two steps, save the two files of a checkpoint, and return (folder, {variable: value})."""
    compiled, exe, _, lr_scheduler, main = build(args)
    for images, labels in random_batches(2):
        exe.run(compiled, {"data": images, "label": labels})
        lr_scheduler.step()
    save(main, tmp_path)
    return tmp_path, {v.name: variable(v.name) for v in main.list_vars() if v.persistable}


def save(program, folder):
    params, optimizer = variables.snapshot(program)
    (folder / "tiny.pdparams").write_bytes(pickle.dumps(params, protocol=4))
    (folder / "tiny.pdopt").write_bytes(pickle.dumps(optimizer, protocol=4))


def load(args, folder, *, is_train=True, seed=7):
    """Load a checkpoint into a new program and return {variable: value}."""
    with static.scope_guard(static.Scope()):
        _, _, _, _, main = build(args, is_train=is_train, seed=seed)
        assert (
            variables.load(args.part(variables.LoadOptions), folder, main, PLACE) == variables.variables(main)[0].keys()
        )
        return {v.name: variable(v.name) for v in main.list_vars() if v.persistable}


@pytest.mark.parametrize("flags", [{"lookahead": [6, 0.5]}, {"optimizer": "AdamW"}])
def test_error_for_different_optimizer_state_names_the_flags(args, saved, flags):
    remedy = r"use the --optimizer, --lookahead and --amp flags of its training \(--verbose lists the variables\)"
    with pytest.raises(UsageError, match=rf"does not match the model \(variables: [^)]*missing.*\); {remedy}"):
        load(args.copy(**flags), saved[0])


def test_loaded_variables_are_bit_identical(args, saved):
    folder, expected = saved
    state = load(args, folder)
    assert state.keys() == expected.keys()
    assert any("velocity" in name and value.any() for name, value in expected.items())
    for name, value in expected.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)


def test_paddle_static_load_reads_saved_files(args, saved):
    folder, expected = saved
    with static.scope_guard(static.Scope()):
        _, exe, _, _, main = build(args, seed=7)
        static.load(main, str(folder / "tiny"), exe)
        for name, value in expected.items():
            np.testing.assert_array_equal(variable(name), value, err_msg=name)


def test_load_reads_files_of_paddle_static_save(args, saved, tmp_path):
    _, expected = saved
    _, _, _, _, main = build(args, seed=3)
    for name, value in expected.items():
        static.global_scope().find_var(name).get_tensor().set(value, PLACE)
    static.save(main, str(tmp_path / "old" / "tiny"))
    state = load(args, tmp_path / "old")
    for name, value in expected.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)


def test_evaluation_loads_only_parameters(args, saved):
    folder, expected = saved
    (folder / "tiny.pdopt").unlink()
    state = load(args, folder, is_train=False)
    assert "conv2d_0.w_0" in state
    for name, value in state.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.slow
def test_different_model_is_rejected_and_verbose_lists_parameters(args, saved):
    args.model_arch_name = "ResNet18"
    message = r"model \(variables: \d+ missing, \d+ with a different shape\); use the --model-arch-name \(now ResNet18"
    with pytest.raises(UsageError, match=message) as error:
        load(args, saved[0])
    assert "batch_norm" not in str(error.value)
    assert str(error.value).endswith(" of its training (--verbose lists the variables)")
    args.verbose = True
    with pytest.raises(UsageError, match=message) as error:
        load(args, saved[0])
    first, missing, reshaped = str(error.value).splitlines()
    assert first.endswith(" of its training")
    assert missing.startswith("missing: batch_norm_10.b_0, batch_norm_10.w_0, batch_norm_10.w_1, ")
    assert "conv2d_2.w_0 is [" in reshaped


def test_different_number_of_classes_is_rejected(args, saved):
    """The remedy in the error message depends on the run scope."""
    args.num_of_class = 4
    remedies = {"train_eval": "to train a new last layer, use --from-pretrained-params and --pretrained-mismatch skip"}
    remedies["eval_only"] = "use --num-of-class 3 and images of its classes$"
    remedies["resume"] = "use --num-of-class 3$"
    for scope, remedy in remedies.items():
        args.resume = scope == "resume"
        args.run_scope = RunScope("train_eval" if args.resume else scope)
        with pytest.raises(UsageError, match=f"has 3 classes, but this run has 4; {remedy}"):
            load(args, saved[0], is_train=scope != "eval_only")
    _, _, _, _, main = build(args)
    mask = "conv2d_0.w_0.asp_mask"  # a dense checkpoint has no masks
    main.global_block().create_parameter(name=mask, shape=[1], dtype="float32")
    static.global_scope().var(mask).get_tensor().set(np.ones(1, np.float32), PLACE)
    with pytest.raises(UsageError, match="has 3 classes, but this run has 4"):
        variables.load(args.part(variables.LoadOptions), saved[0], main, PLACE)


def test_integer_parameters_are_rejected(args, saved):
    path = saved[0] / "tiny.pdparams"
    state = pickle.loads(path.read_bytes())
    for dtype in ("float64", "int64"):
        path.write_bytes(pickle.dumps(state | {"linear_0.b_0": np.ones(3, dtype)}, protocol=4))
        if dtype == "float64":
            assert load(args, saved[0])["linear_0.b_0"].tolist() == [1, 1, 1]
    with pytest.raises(UsageError, match="model .variables: 1 with a different type.;"):
        load(args, saved[0])


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"not a pickle", lambda data: b""]
)
def test_damaged_file_is_rejected(args, saved, damage):
    path = saved[0] / "tiny.pdparams"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UsageError, match=r"tiny.pdparams cannot be read"):
        load(args, saved[0])


def test_files_with_damaged_meta_json_are_rejected(args, tmp_path):
    (tmp_path / contents.META).write_text("{")
    (tmp_path / "tiny.pdparams").write_bytes(b"")
    with pytest.raises(UsageError, match=f"--from-checkpoint {tmp_path}: unusable: .*; choose a different checkpoint"):
        label = f"--from-checkpoint {tmp_path}"
        variables.load(args.part(variables.LoadOptions), tmp_path, None, PLACE, label)
    for path in (tmp_path, tmp_path / "tiny.pdparams"):
        with pytest.raises(UsageError, match=f"--from-pretrained-params {path}: unusable: .*; choose a different"):
            restore.origin(None, args.copy(from_pretrained_params=str(path)).part(restore.Options))


@pytest.mark.parametrize("change", ["deleted", "changed", "checkpoint is being deleted"])
def test_ema_weights_that_change_after_the_check_are_an_error(args, tmp_path, change):
    """The raw weights must not silently be used in place of the EMA weights."""
    main = build(args, is_train=False)[-1]
    state = pickle.dumps({name: variable(name) for name in variables.variables(main)[0]}, protocol=4)
    files = {f"tiny.{suffix}": lambda f: f.write(state) for suffix in ("pdparams", "pdopt", "pdema")}
    folder = folders.commit(tmp_path, "0", files, META)
    args.from_pretrained_params = str(folder)
    options = args.part(variables.LoadOptions)
    variables.load(options, folder, main, PLACE)
    if change == "changed":  # a pickle of the same size with a different weight
        content = bytearray(state)
        content[len(content) // 2] ^= 1
        (folder / "tiny.pdema").write_bytes(content)
    else:
        (folder / "tiny.pdema").unlink()
    if change == "checkpoint is being deleted":
        (folder / "meta.json").rename(folder / ".unfinished")
    for load in (
        lambda: variables.load(options, folder, main, PLACE),
        lambda: variables.load_pretrained(options, main, PLACE),
    ):
        problem = "unusable: (tiny.pdema|meta.json is missing, because)|neither .*/tiny.pdema exists"
        with pytest.raises(UsageError, match=f"^(--from-pretrained-params )?{folder}: ({problem})"):
            load()


def test_missing_optimizer_file_is_rejected(args, saved):
    (saved[0] / "tiny.pdopt").unlink()
    with pytest.raises(UsageError, match=r"tiny.pdopt cannot be read"):
        load(args, saved[0])
    (saved[0] / "tiny.pdopt").write_bytes(pickle.dumps({}, protocol=4))
    message = f"{saved[0]}: has no optimizer state; use --from-pretrained-params {saved[0]}$"
    with pytest.raises(UsageError, match=message):
        load(args, saved[0])


def test_options_come_from_flags(args):
    options = args.part(variables.LoadOptions)
    assert (options.model_arch_name, options.model_prefix, options.has_explicit_asp) == ("Tiny", ("tiny", True), False)
    assert args.copy(asp=False).part(variables.LoadOptions).has_explicit_asp


def test_averages_are_loaded_only_if_program_and_checkpoint_have_them(args, saved):
    options, checkpoint = args.part(variables.LoadOptions), restore.StartCheckpoint(str(saved[0]), 1, label="DIR")
    main = static.Program()
    assert (
        variables.load_states(options, None, main, PLACE)
        == variables.load_states(options, checkpoint, main, PLACE)
        == []
    )
    assert variables.own_files(main, {}) == {}
    averages = facts.State({"linear_0.b_0": "linear_0.b_0.ema"}, ".pdema")
    others = facts.State({"w": "w.slow"}, ".pdopt"), facts.State({"w@GRAD": "sum"}, None)
    facts.of(main).states = [averages, *others]
    assert variables.load_states(options, None, main, PLACE) == variables.states(main)
    assert variables.load_states(options, checkpoint, main, PLACE) == [averages]
    static.global_scope().var("linear_0.b_0.ema").get_tensor().set(np.zeros(3, np.float32), PLACE)
    state = {"linear_0.b_0": np.float32([1, 2, 3]), "linear_0.w_0": np.float32([4])}
    (saved[0] / "tiny.pdema").write_bytes(pickle.dumps(state, protocol=4))
    assert variables.load_states(options, checkpoint, main, PLACE) == []
    files = variables.own_files(main, {"linear_0.b_0": 0, "x": 5})
    assert files.keys() == {".pdema"} and files[".pdema"]["x"] == 5
    np.testing.assert_array_equal(files[".pdema"]["linear_0.b_0"], [1, 2, 3])
    (saved[0] / "tiny.pdema").write_bytes(pickle.dumps({"x": state["linear_0.w_0"]}, protocol=4))
    with pytest.raises(UsageError, match=r"DIR: does not match the model \(variables: 1 missing\)"):
        variables.load_states(options, checkpoint, main, PLACE)


def test_masks_of_sparse_weights_are_dropped_if_requested(args, saved, capsys):
    path = saved[0] / "tiny.pdparams"
    state = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(state | {"conv2d_0.w_0.asp_mask": np.ones_like(state["conv2d_0.w_0"])}, protocol=4))
    for is_train in (False, True):
        with static.scope_guard(static.Scope()):
            main = build(args, is_train=is_train)[-1]
            options = args.part(variables.LoadOptions)
            if is_train:
                with pytest.raises(UsageError, match="has 2:4 sparse weights, which training without --asp makes"):
                    variables.load(options, saved[0], main, PLACE)
                options = dataclasses.replace(options, has_explicit_asp=True)
            assert "conv2d_0.w_0.asp_mask" in variables.load(options, saved[0], main, PLACE)
        assert ("which --asp false makes dense" in capsys.readouterr().err) == is_train


@pytest.mark.parametrize("form", ["folder", "file", "prefix"])
def test_pretrained_parameters_are_loaded_without_optimizer_state(args, saved, form):
    folder, expected = saved
    path = {"folder": folder, "file": folder / "tiny.pdparams", "prefix": folder / "tiny"}[form]
    args.from_pretrained_params = str(path)
    with static.scope_guard(static.Scope()):
        _, _, _, _, main = build(args, seed=7)
        variables.load_pretrained(args.part(variables.LoadOptions), main, PLACE)
        np.testing.assert_array_equal(variable("conv2d_0.w_0"), expected["conv2d_0.w_0"])
        assert not any(variable(v.name).any() for v in main.list_vars() if "velocity" in v.name)


def test_missing_pretrained_parameters_are_rejected(args, tmp_path):
    args.from_pretrained_params = str(tmp_path / "nothing")
    _, _, _, _, main = build(args)
    message = (
        "--from-pretrained-params .*nothing: neither .*/nothing.pdparams nor .*/nothing/.*pdparams exists; choose a"
    )
    with pytest.raises(UsageError, match=message):
        variables.load_pretrained(args.part(variables.LoadOptions), main, PLACE)


def test_skip_classifier_skips_only_classifier(args, saved, capsys):
    folder, expected = saved
    args.from_pretrained_params, args.num_of_class = str(folder), 5
    with static.scope_guard(static.Scope()):
        _, _, _, _, main = build(args, seed=7)
        problem = "has 3 classes, but this run has 5; add --pretrained-mismatch skip"
        with pytest.raises(UsageError, match=f"^--from-pretrained-params {folder}: {problem}"):
            variables.load_pretrained(args.part(variables.LoadOptions), main, PLACE)
        args.pretrained_mismatch = "skip-classifier"
        assert variable("linear_0.w_0").any()
        variables.load_pretrained(args.part(variables.LoadOptions), main, PLACE)
        assert "skipped linear_0.b_0, linear_0.w_0, which start at 0" in capsys.readouterr().out
        assert not variable("linear_0.w_0").any() and not variable("linear_0.b_0").any()
        np.testing.assert_array_equal(variable("conv2d_2.w_0"), expected["conv2d_2.w_0"])
        set_classifier(folder)
        variables.set_variable("linear_0.w_0", np.ones((8, 5), np.float32), PLACE)
        variables.load_pretrained(args.part(variables.LoadOptions), main, PLACE)
        assert not variable("linear_0.w_0").any()
        weight = np.random.randn(8, 5).astype(np.float32)
        set_classifier(folder, w_0=weight, b_0=weight[0])
        variables.load_pretrained(args.part(variables.LoadOptions), main, PLACE)
        assert "skip-classifier: skipped nothing\n" in capsys.readouterr().out
        np.testing.assert_array_equal(variable("linear_0.w_0"), weight)
        # The number of classes is the problem only if all other shapes match.
        args.pretrained_mismatch = "error"
        no_classifier = "has no classifier; train one with --from-pretrained-params and --pretrained-mismatch skip-cla"
        for classifier, message in (
            ({}, no_classifier),
            (
                {"w_0": weight[:, :3, None], "b_0": weight[0, :3]},
                r"does not match the model \(variables: 2 with a different shape\)",
            ),
            (
                {"w_0": weight[:4, :3], "b_0": weight[0, :3]},
                r"does not match the model \(variables: 2 with a different shape\)",
            ),
        ):
            set_classifier(folder, **classifier)
            with pytest.raises(UsageError, match=message):
                variables.load_pretrained(args.part(variables.LoadOptions), main, PLACE)
    args.model_arch_name = "ResNet18"
    with static.scope_guard(static.Scope()):
        _, _, _, _, main = build(args, seed=7)
        with pytest.raises(UsageError, match="does not match the model"):
            variables.load_pretrained(args.part(variables.LoadOptions), main, PLACE)


def set_classifier(folder, **arrays):
    """Replace the classifier in tiny.pdparams. Without arrays, remove it."""
    state = pickle.loads((folder / "tiny.pdparams").read_bytes())
    state = {name: array for name, array in state.items() if not name.startswith("linear_0")}
    state |= {f"linear_0.{name}": array for name, array in arrays.items()}
    (folder / "tiny.pdparams").write_bytes(pickle.dumps(state, protocol=4))


def add_master(program, name):
    """Create the float32 master weight of a parameter, as AMP level O2 does on a GPU, and return its value."""
    value = variable(name)
    master = f"{name}_fp32_master_0"
    program.global_block().create_var(name=master, shape=value.shape, dtype="float32", persistable=True)
    static.global_scope().var(master).get_tensor().set(value, PLACE)
    return value


def test_pretrained_parameters_replace_master_weights(args, saved):
    folder, expected = saved
    args.from_pretrained_params, args.num_of_class = str(folder), 5
    args.pretrained_mismatch = "skip-classifier"
    _, _, _, _, main = build(args, seed=7)
    for name in ("conv2d_2.w_0", "linear_0.w_0"):
        assert add_master(main, name).any()
    variables.load_pretrained(args.part(variables.LoadOptions), main, PLACE)
    np.testing.assert_array_equal(variable("conv2d_2.w_0_fp32_master_0"), expected["conv2d_2.w_0"])
    assert not variable("linear_0.w_0_fp32_master_0").any()


def test_float16_parameters_are_saved_from_float32_masters(args, capsys):
    """Training with --use-pure-fp16 requires a GPU, so the test creates the variables of such a run itself. An
    evaluation in float32 loads the saved file."""
    _, _, _, _, main = build(args)
    name = "conv2d_0.w_0"
    master = add_master(main, name)
    static.global_scope().find_var(name).get_tensor().set(master.astype("float16"), PLACE)
    saved = variables.snapshot(main)[0][name]
    assert saved.dtype == np.float32
    np.testing.assert_array_equal(saved, master)
    mask = (np.arange(master.size).reshape(master.shape) % 2).astype(np.float32)
    main.global_block().create_parameter(name=name + ".asp_mask", shape=mask.shape, dtype="float32")
    static.global_scope().var(name + ".asp_mask").get_tensor().set(mask, PLACE)
    params, _ = variables.snapshot(main)

    def load(state, **changes):
        options = dataclasses.replace(args.part(variables.LoadOptions), **changes)
        variables._load_parameters(options, main, state, "DIR", PLACE)

    dense = {parameter: array for parameter, array in params.items() if parameter != name + ".asp_mask"}
    with pytest.raises(UsageError, match="DIR: has dense weights, but --asp requires pruned weights"):
        load(dense)
    load(dense, prune_model=True)
    # Checkpoints of older versions have no mask for the first layer.
    other = "conv2d_2.w_0.asp_mask"
    main.global_block().create_parameter(name=other, shape=[1], dtype="float32")
    static.global_scope().var(other).get_tensor().set(np.zeros(1, np.float32), PLACE)
    load(params)
    assert variable(other) == 1
    assert f"DIR: has no {other}; the weights of these masks remain dense" in capsys.readouterr().out


@pytest.mark.parametrize(("pretrained", "remedy"), [(None, "--asp"), ("DIR", "--asp --prune-model")])
def test_training_without_asp_does_not_silently_make_weights_dense(args, pretrained, remedy):
    options = dataclasses.replace(args.part(variables.LoadOptions), from_pretrained_params=pretrained)
    with pytest.raises(UsageError, match=f"training without --asp makes dense; use {remedy} to keep them"):
        variables._check_masks_may_be_dropped(options, "DIR")


def test_host_scalars_averages_and_accumulated_gradients_are_not_saved():
    program = static.Program()
    with static.program_guard(program, static.Program()):
        scalars.declare("weight", lambda: 1)
    names = {"w.ema": True, "sum": True, "feed": True, "temporary": False, "state": True}
    facts.of(program).states = [facts.State({"w": "w.ema"}, ".pdema"), facts.State({"w@GRAD": "sum"}, None)]
    for name, persistable in names.items():
        program.global_block().create_var(name=name, shape=[2], persistable=persistable)
    static.global_scope().var("state").get_tensor().set(np.float32([1, 2]), PLACE)
    assert variables.variables(program) == ({}, {"state": (2,)})
    assert [variables._shape(shape) for shape in ((), [2, 3])] == [(1,), (2, 3)]


def test_averages_and_slow_weights_start_from_the_weights(capsys):
    main = static.Program()
    with static.program_guard(main):
        paddle.static.create_parameter([2], "float32", "w")
    static.global_scope().var("w").get_tensor().set(np.float32([1, 2]), PLACE)
    tensor, folder = static.global_scope().var("copy").get_tensor(), SimpleNamespace(folder="DIR")
    for file, checkpoint, starts in (
        (".pdema", None, True),
        (".pdema", folder, True),
        (".pdopt", folder, True),
        (None, None, False),
    ):
        tensor.set(np.zeros(2, np.float32), PLACE)
        state = facts.State({"w": "copy"}, file, starts, "--ema", "EMA weights")
        variables.start_states([state], checkpoint, main, PLACE)
        assert variables.read("copy").tolist() == ([1, 2] if starts else [0, 0])
    assert capsys.readouterr().out == "--ema: EMA weights initialized with the weights of DIR\n"


def test_persistable_variables_are_restored_after_an_error():
    program, scope = static.Program(), static.global_scope()
    for name in ("persistable", "second", "temporary", "absent", "empty"):
        program.global_block().create_var(name=name, shape=[1], persistable=name != "temporary")
    scope.var("empty")

    def assign(value):
        for name in ("persistable", "second", "temporary"):
            scope.var(name).get_tensor().set(np.float32([value]), PLACE)

    assign(1)
    with pytest.raises(ZeroDivisionError), variables.restored(program, PLACE):
        assign(2)
        raise ZeroDivisionError
    assert [variables.read(name).item() for name in ("persistable", "second", "temporary")] == [1, 1, 2]


def test_averaged_statistics_of_rank_are_ignored_without_ema(args, tmp_path):
    build(args)
    path, value = tmp_path / "bn_rank1.npz", np.full_like(variable("batch_norm_0.w_1"), 0.25)
    np.savez(path, **{"batch_norm_0.w_1": value, "batch_norm_0.w_1.ema": value})
    variables.load_statistics(path, PLACE, is_verbose=False)
    np.testing.assert_array_equal(variable("batch_norm_0.w_1"), value)
    np.savez(path, **{"batch_norm_0.w_1": value, "batch_norm_99.w_1.ema": value})
    with pytest.raises(UsageError, match=f"^--resume: {path}: does not match the model .variables: 1 unexpected"):
        variables.load_statistics(path, PLACE, is_verbose=False)


@pytest.mark.parametrize("is_dynamic", [True, False])
def test_static_loss_scale_is_taken_from_flag(args, tmp_path, capsys, is_dynamic):
    args.amp, args.use_dynamic_loss_scaling, args.scale_loss = True, is_dynamic, 128.0
    with static.scope_guard(static.Scope()):
        _, _, _, _, main = build(args)
        save(main, tmp_path)
    assert load(args, tmp_path)[variables.LOSS_SCALE] == 128
    assert "loss scale" not in capsys.readouterr().out
    args.scale_loss = 1024.0
    assert load(args, tmp_path)[variables.LOSS_SCALE] == (128 if is_dynamic else 1024)
    assert ("--scale-loss 1024: replaces the checkpoint's loss scale 128" in capsys.readouterr().out) != is_dynamic


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_float_variables_keep_their_type(dtype):
    tensor = static.global_scope().var("x").get_tensor()
    tensor.set(np.zeros(3, dtype), PLACE)
    variables.set_variable("x", np.float32([1, 2, 3]), PLACE)
    assert variables.read("x").dtype == dtype and variables.read("x").tolist() == [1, 2, 3]
    tensor.set(np.zeros(3, np.int64), PLACE)
    assert not variables._has_type_of("x", np.zeros(3, dtype))


def test_bfloat16_variables_are_rounded_to_nearest_even():
    """GPUs also round to nearest even, whereas Paddle's CPU kernel truncates."""
    values = np.random.RandomState(0).standard_normal(1000).astype(np.float32)
    values[:5] = 0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20  # ties, and one value next to a tie
    tensor = static.global_scope().var("rounded").get_tensor()
    tensor.set(np.zeros(1000, np.uint16), paddle.CPUPlace())
    variables.set_variable("rounded", values, paddle.CPUPlace())
    assert tensor._dtype() == paddle.bfloat16
    assert variables._has_type_of("rounded", values) and not variables._has_type_of("rounded", np.zeros(9, np.int64))
    rounded, below, above = (
        ((variables.read("rounded").astype(np.int64) + step) << 16).astype(np.uint32).view(np.float32)
        for step in (0, -1, 1)
    )
    assert rounded[:5].tolist() == [0, 1, 1 + 2**-6, -1, 1 + 2**-7]
    error = np.abs(rounded - values)[1:]
    assert (error <= np.abs(below - values)[1:]).all() and (error <= np.abs(above - values)[1:]).all()
