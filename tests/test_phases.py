"""The phases before step 1, with simulated functions of the other modules. Tests of complete runs are in test_train.py
and in the folders of the modules that the phases call."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import TINY, tiny
from paddle_resnet import config, phases
from paddle_resnet.components import precision, sparsity
from paddle_resnet.components.stages import Stage
from paddle_resnet.passes import folding
from paddle_resnet.utils.errors import UsageError
from paddle_resnet.utils.mode import Mode


@pytest.mark.parametrize(
    ("device", "flag", "bound"), [("gpu", "true", [("bind_to_gpu", 1)]), ("gpu", "false", []), ("cpu", "true", [])]
)
def test_processes_of_gpus_are_bound_to_the_cpu_cores_closest_to_their_gpu(
    record, monkeypatch, environment, device, flag, bound
):
    environment(FLAGS_selected_gpus=1)
    record(phases.paddle, "enable_static")
    monkeypatch.setattr(phases.resolution, "resolve_device", lambda args: args.set("machine", device=device))
    record(phases, "bind_to_gpu")
    phases.start(config.parse_args(["--enable-cpu-affinity", flag]))
    assert record.calls == [*bound, ("enable_static",)]


@pytest.mark.parametrize(
    ("flags", "mode", "is_saving"),
    [
        ([], Mode.TRAIN, True),
        (["--benchmark"], Mode.TRAIN, False),
        (["--run-scope", "eval_only", "--from-checkpoint", "c"], Mode.EVAL, False),
    ],
    ids=["train", "benchmark", "eval"],
)
def test_only_runs_that_save_check_and_claim_the_output_folder(record, monkeypatch, flags, mode, is_saving):
    record(phases.agreement, "check_start")
    record(phases.recipe, "choose")
    record(phases.restore, "resolve_network", "find", "inherit_flags")
    record(
        phases.resolution, "resolve_layout", "resolve_loader", "resolve_kernels", "resolve_classes", "resolve_report"
    )
    record(phases.budget, "is_needed")
    record(phases.progress, "phase")
    record(phases.saver, "check_folder")
    record(phases.logger, "warn", "setup")
    record(phases.report, "outputs", "announced", "check_replaced")
    monkeypatch.setattr(phases.validation, "warnings", lambda args: ["unusual"])
    monkeypatch.setattr(phases.layout, "occupied", lambda root: [f"{root}/x"])
    monkeypatch.setattr(phases.outputs, "claim", lambda *args, **options: record.calls.append(("claim", args, options)))
    record.results |= {"find": "checkpoint", "outputs": {"the report": "r"}, "announced": "a"}
    places = ["--output-dir", "o", "--report-file", "r", "--skip-list", "s", "--image-root", "i"]
    args = config.parse_args([*TINY, *places, "--profile-steps", "1:2", "--overwrite", *flags])
    args.tensorboard_dir = "t"

    assert phases.find_start(args) == "checkpoint"
    folder = Path("o/Tiny")
    expected = [(name, args) for name in ("check_start", "choose", "resolve_network", "find")]
    expected += [("inherit_flags", args, "checkpoint"), ("phase", "kernel compilation")]
    expected += [
        ("resolve_layout", args),
        ("resolve_loader", args),
        ("warn", "unusual"),
        ("resolve_kernels", args),
        ("resolve_classes", args, mode),
    ]
    expected += [
        ("resolve_report", args, folder, phases.report.default_name(args.run_scope, args.benchmark)),
        ("is_needed", args, "checkpoint"),
    ]
    if is_saving:
        expected += [("check_folder", folder, "checkpoint", args.start_paths(), True, False)]
    assert record.calls == expected
    assert args.is_frozen

    record.calls.clear()
    record(phases.exchange, "from_rank_0")
    phases.claim_outputs(args, "checkpoint")
    [(_, claim)] = record.calls  # only rank 0 calls this function
    record.calls.clear()
    claim()
    (_, (files, folders), options), *others = record.calls[2:]  # after report.outputs and report.announced
    assert {name: str(path) for name, path in files.items()} == {
        "the report": "r",
        "the trace of --profile-steps": "o/profile/steps_1_2_rank0.json",
    }
    assert folders == {"--output-dir": folder if is_saving else None, "--tensorboard-dir": "t"}
    assert options.pop("inputs") == [*phases.input_files(args), ("the lr_find curve", folder / "lr_find.json")]
    assert options == {"protected": [("the data set's", "i/x")], "run_folder": folder, "announced": "a"}
    assert others == [("setup", "r"), ("check_replaced", args.part(phases.report.Options), "checkpoint", folder)]


def test_only_training_that_reached_its_end_is_done():
    flags = "--iter-unit batch --num-iter 7 --patience 2 --warmup-epochs 0"
    args = config.parse_args(tiny(*flags.split()))
    checkpoint = SimpleNamespace(is_done=lambda *flags: flags == ("batch", 90, 7, 2))
    assert phases.is_done(args, checkpoint)
    assert not phases.is_done(args, None)
    assert not phases.is_done(args, SimpleNamespace(is_done=lambda *_: False))
    args = config.parse_args([*TINY, *flags.split(), "--run-scope", "eval_only", "--from-checkpoint", "c"])
    assert not phases.is_done(args, checkpoint)


def test_evaluated_checkpoint_is_logged(record):
    record(phases.restore, "origin", "log_evaluated")
    record.results |= {"origin": ("folder", "meta"), "log_evaluated": 4}
    args = config.parse_args([*TINY, "--from-pretrained-params", "d"])
    assert phases.log_evaluated(args, "checkpoint") == 4
    assert record.calls == [("origin", "checkpoint", "d", ("tiny", True)), ("log_evaluated", "folder", "meta")]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_loader_writes_normalized_images_to_tensorboard(record, device):
    from paddle_resnet.results import tensorboard

    record(tensorboard, "follow")
    record(phases.pixels, "pictures")
    record(phases.paddle.device.cuda, "synchronize")
    record.results["follow"] = "writer"
    training = phases.Work(None, "loader", "program", {}, SimpleNamespace(timeline="timeline"))
    args = config.parse_args([*TINY, "--normalize-scale", "0.5"])
    assert phases.show_on_tensorboard(args, training, None) is training
    args = config.parse_args([*TINY, "--normalize-scale", "0.5", "--tensorboard-dir", "d"])
    args.set("machine", device=device)
    assert phases.show_on_tensorboard(args, training, "checkpoint") == training._replace(loader="writer")
    [(*called, pictures)] = record.calls
    assert called == ["follow", "d", "loader", "timeline", "checkpoint"]
    pictures({"data": "images"})
    expected = ("pictures", "images", "NCHW", 0.5, args.normalize_mean, args.normalize_std)
    assert record.calls[1:] == [*[("synchronize",)] * (device == "gpu"), expected]


def test_stages_share_the_schedule_and_one_startup_program_runs(monkeypatch, shard):
    """Each of two processes has 4 of 9 images. The evaluation program shares the parameters of the training program, so
    its startup program runs only in an evaluation."""
    events, batches = [], []

    def build(args, main, startup, steps, is_train=True, lr_scheduler=None, class_images=None):
        events.append((args, startup, steps, is_train, lr_scheduler, class_images))
        return f"fetchs of {args}", lr_scheduler, "feeds", f"optimizer of {args}"

    stages = [SimpleNamespace(settings=f"stage {epoch}", first_epoch=epoch) for epoch in (1, 3)]
    monkeypatch.setattr(phases, "stages_from", lambda args, epoch: stages[epoch:])
    shard(world_size=2)
    monkeypatch.setattr(phases, "timeline", lambda args, images: f"{images} images")
    monkeypatch.setattr(phases.schedules, "build_lr_scheduler", lambda options, timeline: f"schedule of {timeline}")
    monkeypatch.setattr(phases.program, "build", build)
    monkeypatch.setattr(phases.paddle, "seed", lambda seed: events.append(seed))
    loader, args = SimpleNamespace(data_set_size=9, class_images="counts"), SimpleNamespace(seed=7, part=vars)
    exe = SimpleNamespace(run=batches.append)

    training, evaluation = phases.build_programs(args, exe, loader, "eval loader")
    (_, startup, *_), (_, later_startup, *_), (_, eval_startup, *_) = events[1:]
    options = (0, True, "schedule of 4 images", "counts")
    expected = [7, ("stage 1", startup, *options), ("stage 3", later_startup, *options)]
    assert events == [*expected, (args, eval_startup, 0, False, None, None)]
    assert len({startup, later_startup, eval_startup}) == 3 and batches == [startup]
    [(epoch, later)] = training.later
    assert (epoch, later.settings, later.loader, later.optimizer) == (3, "stage 3", None, "optimizer of stage 3")
    assert (training.settings, training.loader, training.fetchs) == ("stage 1", loader, "fetchs of stage 1")
    assert training.lr_scheduler == later.lr_scheduler == "schedule of 4 images"
    assert (evaluation.settings, evaluation.loader) == (args, "eval loader")

    # A run that starts in the last stage builds only this stage.
    training, evaluation = phases.build_programs(args, exe, loader, None, SimpleNamespace(epoch=1))
    assert (training.settings, training.later, evaluation) == ("stage 3", [], None)
    assert phases.build_programs(args, exe, None, "eval loader")[0] is None
    assert batches[-1] is events[-1][1]


def test_new_stage_continues_the_image_order_unless_batches_are_equal(monkeypatch, capsys):
    loader = SimpleNamespace(state=lambda: "state")
    values = {"image_shape": [3, 32, 32], "batch_size": 8, "freeze": None}
    schedule = SimpleNamespace(timeline=SimpleNamespace(lr_factor=lambda step: step / 8), done=4)
    monkeypatch.setattr(phases.program, "compile_prog", lambda *inputs: SimpleNamespace(inputs=inputs, trace="trace"))
    monkeypatch.setattr(phases.dali, "build_dataloader", lambda *arguments: arguments)
    followed = []
    saver = SimpleNamespace(follow=lambda *arguments: followed.append(arguments))
    for change in ({}, {"batch_size": 6}, {"image_shape": [3, 24, 24]}):
        now = SimpleNamespace(**(values | change))
        later = phases.Work(now, None, "later program", "later fetchs", schedule)
        training = phases.Work(SimpleNamespace(**values), loader, "program", "fetchs", later=[(2, later)])
        assert phases.enter_stage(training, 1, saver) is training
        entered = phases.enter_stage(training, 2, saver)
        assert phases.enter_stage(entered, 3, saver) is entered  # no later stage
        assert entered.loader == ((now, Mode.TRAIN, "state") if change else loader)
        assert followed.pop() == (entered.loader, "later fetchs", "later program")
        assert (entered.compiled.inputs, entered.compiled.trace) == ((now, "later program"), None)
    lines = capsys.readouterr().out.splitlines()
    text = "epoch 2: training with --image-shape {}, --batch-size {}, learning rate x 0.5 (--sizes)"
    assert lines == [text.format("3,32,32", 6), text.format("3,24,24", 8)]
    for freeze, is_logged in (("stem", False), (None, True)):
        later = phases.Work(SimpleNamespace(**values | {"freeze": freeze}), None, "later program", {}, schedule)
        training = phases.Work(
            SimpleNamespace(**values | {"freeze": "stem"}), loader, "program", {}, later=[(2, later)]
        )
        phases.enter_stage(training, 2, saver)
        assert capsys.readouterr().out == "epoch 2: training all layers from now on (--unfreeze-at)\n" * is_logged


@pytest.fixture
def set_weights(record, monkeypatch):
    """Return a function that calls set_weights for a training run and returns (its result, the calls)."""
    record(phases.variables, "load_start", "load_states", "start_states")
    monkeypatch.setattr(phases.variables, "states", lambda program: f"all states of {program}")
    record(phases.watchdog, "phase")
    monkeypatch.setattr(phases.variables.LoadOptions, "of", lambda args: "options")
    monkeypatch.setattr(phases.processes, "place", lambda device: f"place of {device}")
    record(phases.restore, "restore")
    record(sparsity, "prune", "apply_masks", "describe")
    record(precision, "cast_evaluation_program")
    monkeypatch.setattr(phases.quantization, "float32_variables", lambda program: f"float32 of {program}")
    record.results |= {"restore": "restored", "describe": "sparse layers"}

    def set_weights(checkpoint, is_sparse=False, evaluation=None, **flags):
        record.results |= {"load_start": {"w.asp_mask"} if is_sparse else {"w"}, "load_states": "missing states"}
        args = settings(**flags)
        optimizer = SimpleNamespace(amp_init=lambda place, scope: record.calls.append(("amp_init", place)))
        training = phases.Work(args, "loader", "program", "fetchs", "schedule", optimizer)
        return phases.set_weights(args, checkpoint, training, evaluation), record.calls

    return set_weights


def settings(**flags):
    def part(cls):
        return cls(**{field.name: getattr(args, field.name, field.default) for field in dataclasses.fields(cls)})

    args = SimpleNamespace(**{**vars(ARGS), **flags}, part=part)
    return args


ARGS = SimpleNamespace(
    device="cpu",
    data_layout="NCHW",
    kernels="paddle",
    iter_unit="epoch",
    multi_label=False,
    verbose=False,
    qat=False,
    amp=False,
    amp_dtype="float16",
    amp_level="O2",
    asp=False,
    prune_model=False,
    mask_algo="mask_1d",
    num_of_class=3,
    from_pretrained_params=None,
    flag_value=str,
)
LOAD = [("load_start", "options", None, "program", "place of cpu")]
LOAD += [("load_states", "options", None, "program", "place of cpu")]
RESTORE = [(*call[:2], "checkpoint", *call[3:]) for call in LOAD]
RESTORE += [("restore", "checkpoint", "schedule", "loader", "fetchs", "place of cpu")]
MASK = ("apply_masks", "program", "place of cpu")
PRUNE = ("prune", "program", "place of cpu", "mask_1d")


def start(checkpoint, states="missing states"):
    return ("start_states", states, checkpoint, "program", "place of cpu")


@pytest.mark.parametrize(
    ("checkpoint", "state", "flags", "expected"),
    [
        (None, {}, {}, [*LOAD, start(None)]),
        ("checkpoint", {}, {}, [*RESTORE, start("restored")]),
        ("checkpoint", {}, {"amp": True}, [*RESTORE, ("amp_init", "place of cpu"), start("restored")]),
        # The lookahead weights and the averages start from pruned weights.
        (
            "checkpoint",
            {},
            {"prune_model": True, "amp": True},
            [*RESTORE, ("amp_init", "place of cpu"), PRUNE, start("restored", "all states of program")],
        ),
        ("checkpoint", {"is_sparse": True}, {"prune_model": True}, [*RESTORE, start("restored")]),
        (
            None,
            {"is_sparse": True},
            {"prune_model": True, "asp": True},
            [*LOAD, MASK, ("describe", "program"), start(None)],
        ),
    ],
    ids=["scratch", "checkpoint", "amp", "prune", "pruned", "pruned parameters"],
)
def test_weights_are_loaded_pruned_and_copied_in_this_order(set_weights, checkpoint, state, flags, expected):
    result, calls = set_weights(checkpoint, **state, **flags)
    assert calls == [("phase", "weight loading"), *expected]
    assert result == (checkpoint and "restored")


def test_half_precision_casts_only_the_evaluation_program_without_its_float32_variables(set_weights):
    evaluation = phases.Work(None, None, "evaluation", None)
    assert not [call for call in set_weights(None, evaluation=evaluation)[1] if call[0] == "cast_evaluation_program"]
    _, calls = set_weights(None, evaluation=evaluation, amp=True)
    options = ("place of cpu", "float16", "O2", "float32 of evaluation")
    assert calls[-1] == ("cast_evaluation_program", "evaluation", *options)
    phases.set_weights(settings(), None, None, evaluation)  # an evaluation has no training state
    assert calls[-1][0] == "load_start" and calls[-1][3] == "evaluation"


@pytest.mark.parametrize(
    ("flags", "trains", "expected"),
    [
        ({}, True, ["averages"]),
        ({"amp": True}, True, ["averages", "folded"]),
        ({"amp": True, "qat": True}, True, ["averages"]),
        ({"amp": True}, False, ["folded"]),
        ({}, False, []),
    ],
    ids=str,
)
def test_weights_of_half_precision_evaluations_are_averaged_then_folded(monkeypatch, flags, trains, expected):
    updates, compiled = [], []
    monkeypatch.setattr(phases.watchdog, "phase", updates.append)
    made = []
    monkeypatch.setattr(
        phases.averages, "evaluate", lambda *inputs: made.append(inputs) or (lambda: updates.append("averages"))
    )
    monkeypatch.setattr(phases, "_fold", lambda *inputs: made.append(inputs) or [lambda: updates.append("folded")])
    monkeypatch.setattr(
        phases.program, "compile_prog", lambda *program, is_train=True: compiled.append((*program, is_train)) or program
    )
    args = SimpleNamespace(**{**vars(ARGS), **flags})
    training = phases.Work("stage", None, "training", None) if trains else None
    training, evaluation = phases.compile_programs(args, "exe", training, phases.Work(args, None, "evaluation", None))
    evaluation.refresh()
    assert updates == ["program compilation", *expected]
    inputs = {"averages": ("training", "evaluation", "exe"), "folded": (args, "exe", "evaluation")}
    assert made == [inputs[name] for name in expected]
    assert compiled == [*([("stage", "training", True)] if trains else []), (args, "evaluation", False)]
    assert evaluation.compiled == (args, "evaluation")
    assert training is None or training.compiled == ("stage", "training")
    assert phases.compile_programs(args, "exe", None, None) == (None, None)


NATIVE = {"kernels": "native", "device": "gpu", "data_layout": "NHWC"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [("fold_batch_norms", "program", "exe", 1)]),
        ({"data_layout": "NHWC"}, [("fold_batch_norms", "program", "exe", -1)]),
        (NATIVE, [("fuse_convolutions", "program", "exe")]),
        *((NATIVE | other, []) for other in ({"device": "cpu"}, {"data_layout": "NCHW"})),
        *((NATIVE | other, []) for other in ({"amp_level": "O1"}, {"amp_dtype": "bfloat16"})),
    ],
    ids=str,
)
def test_custom_kernels_fold_only_convolutions_that_they_fuse(record, flags, expected):
    record(folding, "fold_batch_norms", "fuse_convolutions")
    record.results |= {"fold_batch_norms": "update", "fuse_convolutions": (2, "update")}
    args = SimpleNamespace(**{**vars(ARGS), **flags})
    assert phases._fold(args, "exe", "program") == ["update"] * len(expected)
    assert record.calls == expected


@pytest.mark.parametrize(
    ("is_needed", "is_dry", "shows", "expected"),
    [
        (False, False, False, []),
        (True, False, True, ["choose", "describe"]),
        (True, True, True, ["describe"]),
    ],
)
def test_settings_are_described_after_the_epochs_are_chosen(record, monkeypatch, is_needed, is_dry, shows, expected):
    record(phases.agreement, "check_work")
    record(phases, "fused_operators")
    record(phases.budget, "is_needed", "choose")
    record(phases, "_warn_of_bn_momentum", "describe", "stages_from")
    record(phases.report, "start_line")
    record(phases.logger, "info")
    record(phases.all_reduces, "count_gradient_all_reduces")
    record.results |= {"fused_operators": {"native_bn": 1}, "count_gradient_all_reduces": 3}
    args = SimpleNamespace(kernels="native", device="cpu", dry_run=is_dry, show_config=shows, benchmark=False)
    args.part = lambda options: "options of the evaluation"
    stage = SimpleNamespace(part=lambda options: "options of the stage")
    chosen = SimpleNamespace(**vars(args), epochs=2) if is_needed and not is_dry else args
    record.results |= {"is_needed": is_needed, "choose": chosen, "stages_from": [Stage(0, stage)]}
    captured = SimpleNamespace(captured="graph")
    training = phases.Work(stage, "train loader", SimpleNamespace(name="training"), None, compiled=captured, later=[])
    evaluation = phases.Work(args, "eval loader", SimpleNamespace(), None, compiled=SimpleNamespace(captured=None))
    assert phases.check_and_describe(args, "exe", "checkpoint", training, evaluation) == (chosen, training)
    assert record.calls[0] == ("check_work", "native", "train loader", "eval loader", training.program)
    assert ("fused_operators", "cpu", captured) in record.calls
    assert [name for name, *_ in record.calls if name in ("choose", "describe")] == expected
    assert ("is_needed", args, "checkpoint") in record.calls
    assert ("_warn_of_bn_momentum", chosen, training) in record.calls
    line = ("start_line", "options of the stage", "train loader", "eval loader", {"native_bn": 1}, 3, True)
    assert record.calls[-2] == line
    record.results["is_needed"] = False  # an evaluation
    assert phases.check_and_describe(args, "exe", None, None, evaluation) == (args, None)
    assert record.calls[-2] == (
        "start_line",
        "options of the evaluation",
        None,
        "eval loader",
        {"native_bn": 1},
        3,
        False,
    )


def test_settings_that_differ_from_defaults_are_described_with_origins():
    args = config.parse_args(["--lr", "0.25"])
    args.choose("fits", epochs=90)  # the default
    text = phases.describe(args)
    assert "lr: 0.25  # command line" in text.splitlines()
    assert "epochs: 90  # chosen: fits" in text.splitlines()
    assert "\nmomentum: " not in text
    args = config.parse_args(["--show-config"])
    assert "\nmomentum: 0.875  # default" in phases.describe(args)


@pytest.fixture
def open_data(record, monkeypatch):
    """Return a function that calls open_data and returns the lengths of the two loaders, and the calls."""
    record(phases.restore, "recorded_classes", "compare_classes")
    record(phases.dali, "warn_of_unused_outputs")
    record(phases.trace, "check")
    record.results["recorded_classes"] = ["a"]
    monkeypatch.setattr(phases, "_origin", lambda *_: ("folder", "meta"))
    monkeypatch.setattr(
        phases.restore, "compare_classes", lambda *args, is_fine_tuning: record.calls.append((*args, is_fine_tuning))
    )
    monkeypatch.setattr(phases.durations, "first_pass", lambda settings, timeline: timeline.batches(0))

    roots = []

    def build(args, mode, state=None, trained=None, root=None):
        roots.append(root)
        assert root is roots[0] and root is not None  # the data set is opened once
        record.calls.append(("build", mode, state, trained))
        return [mode] * (9 if mode is Mode.TRAIN else 4)

    monkeypatch.setattr(phases.dali, "build_dataloader", build)

    def open_data(*flags, checkpoint=None):
        record.calls.clear()
        roots.clear()
        args = config.parse_args([*TINY, "--from-pretrained-params", "x", "--profile-steps", "1:2", *flags])
        train_loader, eval_loader = phases.open_data(args, checkpoint)
        return train_loader and len(train_loader), eval_loader and len(eval_loader), record.calls

    return open_data


CHECKPOINT = SimpleNamespace(epoch=0, loader_state="state", folder="F", resumes=False)


@pytest.mark.parametrize(
    ("flags", "checkpoint", "expected"),
    [
        ([], None, [9, 4, (None, None, True)]),
        ([], CHECKPOINT, [9, 4, ("state", None, False)]),
        (["--run-scope", "train_only"], None, [9, None, (None, None, True)]),
        (["--run-scope", "eval_only"], None, [None, 4, (None, ["a"], False)]),
        (["--benchmark"], None, [9, None, (None, None, True)]),
        (["--benchmark", "--run-scope", "eval_only"], None, [None, 4, (None, ["a"], False)]),
    ],
    ids=["scratch", "checkpoint", "train", "eval", "benchmark", "benchmark of eval"],
)
def test_loaders_get_the_state_and_the_classes_of_the_checkpoint(open_data, flags, checkpoint, expected):
    train, evaluation, (state, trained, is_fine_tuning) = expected
    *lengths, calls = open_data(*flags, checkpoint=checkpoint)
    assert lengths == [train, evaluation]
    builds = [call for call in calls if call[0] == "build"]
    assert builds == [
        *([("build", Mode.TRAIN, state, None)] if train else []),
        *([("build", Mode.EVAL, None, trained)] if evaluation else []),
    ]
    loader = [Mode.TRAIN] * 9 if train else [Mode.EVAL] * 4  # the training loader if there is one
    others = [call for call in calls if call[0] not in ("build", "recorded_classes")]
    assert others[0] == ("folder", "meta", loader, is_fine_tuning)
    # An evaluation cannot change the number of outputs.
    warnings = [(call[0], call[2]) for call in others[1:] if call[0] == "warn_of_unused_outputs"]
    assert warnings == ([("warn_of_unused_outputs", loader)] if train else [])
    # A run that continues checks --profile-steps when its position is known.
    steps = 100 + 100 if "--benchmark" in flags else len(loader)
    assert [call for call in others if call[0] == "check"] == ([] if checkpoint else [("check", [1, 2], steps)])


@pytest.mark.parametrize(
    ("checkpoint", "size"), [(None, 24), (SimpleNamespace(epoch=1, loader_state=None, resumes=False), 32)]
)
def test_training_loader_has_the_image_size_of_the_first_stage(open_data, monkeypatch, checkpoint, size):
    sizes = []
    monkeypatch.setattr(phases.dali, "build_dataloader", lambda args, *_, **__: sizes.append(args.crop_size) or [0] * 9)
    open_data("--epochs", "2", "--sizes", "24:0,32:1", checkpoint=checkpoint)
    assert sizes == [size, 32]  # training and evaluation


def test_damaged_loader_state_is_attributed_to_the_checkpoint(open_data, monkeypatch):
    def build(*arguments, **options):
        raise phases.dali.StateError("the loader state is damaged (x)")

    monkeypatch.setattr(phases.dali, "build_dataloader", build)
    with pytest.raises(
        UsageError, match=r"^F: the loader state is damaged \(x\); move this checkpoint away, or choose"
    ):
        open_data(checkpoint=CHECKPOINT)


def test_inputs_of_a_run_are_protected(tmp_path, work_in):
    work_in(tmp_path)
    (tmp_path / "net.py").touch()
    (tmp_path / "epoch").mkdir()
    (tmp_path / "epoch/x.pdema").touch()
    (tmp_path / "c.yaml").write_text("lr: 0.1")
    flags = ["--config", "c.yaml", "--skip-list", "skip.txt", "--from-pretrained-params", "epoch"]
    args = config.parse_args([*TINY, *flags, "--model-arch-name", "net.py:Net"])
    start = "--from-pretrained-params"
    assert {(name, str(path)) for name, path in phases.input_files(args)} == {
        ("--config", "c.yaml"),
        ("--skip-list", "skip.txt"),
        ("--model-arch-name", "net.py"),
        (start, "epoch.pdparams"),
        (start, "epoch.pdopt"),
        (start, "epoch/x.pdema"),
    }
    assert phases.input_files(config.parse_args(TINY)) == []
