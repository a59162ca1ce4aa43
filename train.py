"""Train, evaluate or benchmark: `python train.py --help`, or through `python -m paddle.distributed.launch`."""

import sys

import yaml

import config
from paddle_resnet import report  # sets Paddle's environment, so before any import of Paddle
from paddle_resnet.data import listing
from paddle_resnet.job.processes import check_environment, world_size
from paddle_resnet.models import registered_name
from utils import exit_codes, logger, progress, signals
from utils.errors import RunError
from utils.mode import Mode


def main(argv=None):
    """Run and return the exit code: 0 done, 1 failure, 2 usage, configuration or data, 75 stopped by a signal with all
    work saved, 130 interrupted."""
    try:
        return exit_codes.of("train.py", lambda: _main(sys.argv[1:] if argv is None else argv), needs_stdout=False)
    finally:
        logger.close()


def _main(argv):
    with signals.watched():
        with logger.result_on_stdout():
            args = config.parse_args(argv)
            if args.print_config:
                return print(yaml.safe_dump(config.as_file(args), sort_keys=False).rstrip())
        with progress.shown():
            _run(args, argv)


def _run(args, argv):
    """The phases of a run, in order."""
    check_environment()
    args.model_arch_name = registered_name(args.model_arch_name)
    if args.data_format != "synthetic" and world_size() == 1:  # a job reports it once its processes are connected
        listing.check_root(args.image_root)
    progress.phase("the import of Paddle")
    try:  # takes seconds, so after the flags are known to be right
        with signals.held_back():
            from paddle import static
        from paddle_resnet import compat

        compat.check_version()
        from paddle_resnet import phases
    except ImportError as e:
        raise RunError(f"Paddle or DALI cannot be imported ({e}): see python -m paddle_resnet.doctor") from e
    from paddle_resnet.job import exchange, fleet, processes

    phases.start(args)
    with exchange.leaving_together():
        fleet.connect(args)
        found = phases.find_start(args)
        if args.run_scope.trains and found and found.epoch >= args.epochs:
            return report.all_done(args, found)
        phases.claim_outputs(args, found)
        fleet.start(args)
        exe = static.Executor(processes.place(args))
        train_loader, eval_loader = phases.open_data(args, found)
        training, evaluation = phases.build_programs(args, exe, train_loader, eval_loader)
        phases.set_weights(args, found, training, evaluation)
        training, evaluation = phases.compile_programs(args, exe, training, evaluation)
        phases.check_and_describe(args, training, evaluation)
        if args.dry_run:
            logger.info("dry run: flags, data and programs are in order")
        elif training is None:
            _evaluate_only(args, argv, exe, found, evaluation)
        elif args.benchmark:
            _benchmark_training(args, argv, exe, found, training)
        else:
            _run_epochs(args, argv, exe, found, training, evaluation)


def _evaluate_only(args, argv, exe, found, evaluation):
    from paddle_resnet.checkpoints import restore

    logger.begin(config.as_dict(args))
    epoch = restore.log_evaluated(args, found)
    report.conclude(args, argv, _evaluate(args, exe, evaluation, epoch), Mode.EVAL)


def _benchmark_training(args, argv, exe, found, training):
    logger.begin(config.as_dict(args), goes_on=report.resumes(args, found))
    report.conclude(args, argv, _train(args, exe, training, 0), Mode.TRAIN)


def _run_epochs(args, argv, exe, found, training, evaluation):
    """Train, evaluate and save, epoch by epoch; then the summary."""
    from paddle_resnet.checkpoints.saver import Saver
    from paddle_resnet.passes import all_reduces

    saver = Saver(args, training.program, training.lr_scheduler, training.loader, training.fetchs, found)
    if args.tensorboard_dir is not None:
        from paddle_resnet.results import tensorboard

        training = training._replace(loader=tensorboard.follow(args, training.loader, found))
    logger.begin(config.as_dict(args), goes_on=report.resumes(args, found))
    is_advised = False
    average_bn = all_reduces.bn_averager(exe, training.program)
    trained = found and found.trained  # not None: the epoch was stopped in its evaluation
    for epoch in range(found.epoch if found else 0, args.epochs):
        is_last = epoch + 1 == args.epochs
        evaluated = None
        try:
            if trained is None:
                trained = _train(args, exe, training, epoch, saver.save)
                average_bn()
                is_advised = is_advised or report.advise_on_loader(args, epoch, trained)
            if evaluation and (is_last or (epoch + 1) % args.eval_interval == 0):
                evaluated = _evaluate(args, exe, evaluation, epoch)
        except Exception as e:
            saver.rescue(e, epoch, trained)
            raise
        if is_last or (epoch + 1) % args.save_interval == 0:
            saver.save(epoch, None, trained, evaluated)
        last_trained, trained = trained, None
    saver.finish()
    report.summarise(args, argv, last_trained, evaluated, saver.best, saver.folder)


def _train(args, exe, training, epoch, save=None):
    """Train for one epoch, or for what is left of it, or the steps of a benchmark; returns program.run's result."""
    from paddle_resnet import program

    result = program.run_and_save(
        *(args, training.loader, exe, training.compiled, training.fetchs),
        *(epoch, Mode.TRAIN, training.lr_scheduler, save),
    )
    if not args.benchmark:
        program.log_info((epoch,), result, Mode.TRAIN)
    return result


def _evaluate(args, exe, evaluation, epoch):
    """Evaluate with the parameters as they are now; returns program.run's result without its arrays."""
    from paddle_resnet import program

    evaluation.refold()
    result = program.run(args, evaluation.loader, exe, evaluation.compiled, evaluation.fetchs, epoch, Mode.EVAL)
    program.log_info((epoch,), result, Mode.EVAL)
    return report.write_classes(args, result, evaluation.loader.class_names)


if __name__ == "__main__":
    sys.exit(signals.leaving(main()))
