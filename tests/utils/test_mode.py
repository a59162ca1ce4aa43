"""The values of --run-scope."""

from paddle_resnet.utils.mode import Mode, RunScope


def test_scope_determines_modes():
    assert {scope.value: (scope.trains, scope.evaluates) for scope in RunScope} == {
        "train_eval": (True, True),
        "train_only": (True, False),
        "eval_only": (False, True),
    }
    assert [mode.value for mode in Mode] == ["train", "val"]
