"""The properties of the checkpoint that a run starts from."""

from helpers import write_checkpoint
from paddle_resnet.checkpoints import folders
from paddle_resnet.checkpoints.start import StartCheckpoint


def test_properties_of_start_checkpoint(shard):
    metrics = {"top1": 0.5}
    meta = {"steps_each_epoch": 3, "trained": metrics, "evaluations_since_best": 2, "lr_scheduler": {"last_epoch": 6}}
    meta["ranks"] = [{"loader": "first"}, {"loader": "second"}]

    def start(step, resumes=True):
        return StartCheckpoint("DIR", 4, step, meta, resumes)

    for rank, state in ((0, "first"), (1, "second"), (5, "second")):
        shard(rank=rank)
        assert start(2).loader_state == state
    assert start(2, resumes=False).loader_state is None
    assert [start(step).is_inside for step in (0, 2, 3)] == [False, True, False]
    assert [start(step).trained for step in (0, 3)] == [None, metrics]
    assert [start(0, resumes).evaluations_since_best for resumes in (True, False)] == [2, 0]
    assert [start(0).ended_early(patience) for patience in (0, 1, 2, 3)] == [False, True, True, False]
    assert [start(0).is_done("epoch", epochs, 0, 0) for epochs in (3, 4, 5)] == [True, True, False]
    assert [start(0).is_done("batch", 4, steps, 0) for steps in (6, 7)] == [True, False]
    assert start(0).is_done("epoch", 5, 0, 2) and start(0).is_done("batch", 4, 7, 2)


def test_run_continues_only_from_newest_checkpoint(tmp_path):
    ranks = [{"loader": {"step": 1, "conditions": {}}, "meters": {}}]
    write_checkpoint(tmp_path, "0_1", step=1, ranks=ranks)
    assert StartCheckpoint(str(tmp_path / "0_1"), 0, 1).continues(tmp_path)
    assert not StartCheckpoint(str(tmp_path / "0_1"), 0, 0).continues(tmp_path)
    write_checkpoint(tmp_path, "1", sequence=1, epoch=1)
    folders.mark(tmp_path, "latest", "1")
    assert StartCheckpoint(str(tmp_path / "latest"), 2).continues(tmp_path)
    assert not StartCheckpoint(str(tmp_path / "0_1"), 0, 1).continues(tmp_path)
    assert not StartCheckpoint(str(tmp_path / "1"), 2).continues(tmp_path / "new")
    for epoch in ("1", "2"):  # checkpoints of a different program
        (tmp_path / "foreign" / epoch).mkdir(parents=True)
        (tmp_path / "foreign" / epoch / "tiny.pdparams").touch()
        start = StartCheckpoint(str(tmp_path / "foreign" / epoch), int(epoch) + 1)
        assert start.continues(tmp_path / "foreign")
    assert not StartCheckpoint(str(tmp_path / "foreign/1"), 2).continues(tmp_path / "foreign")
