"""Train, evaluate or benchmark a network; see `python train.py --help`. To use several processes, start train.py with
Paddle's launcher."""

import sys

from paddle_resnet import config, report, run_report, startup
from paddle_resnet.settings import durations, parsing
from paddle_resnet.utils import exit_codes, logger, progress, signals
from paddle_resnet.utils.errors import program
from paddle_resnet.utils.mode import Mode


def main(argv: list[str] | None = None) -> int:
    """Run train.py and return its exit code: 0 success, 1 failure, 2 error in usage, configuration or data, 75 stopped
    by a signal, 130 interrupted, 141 if the reader of the result has exited (`| head`). Exceptions that exit_codes.of
    does not convert are raised."""
    try:
        arguments = sys.argv[1:] if argv is None else argv
        return exit_codes.of(program("train"), lambda: _main(arguments), needs_stdout=False)
    finally:
        logger.close()


def _main(argv):
    if not argv and config.needs_flags():
        return config.print_help()
    with signals.watched():
        with logger.result_on_stdout():
            args = config.parse_args(argv)
            if args.print_config:
                return print(*(f"# {line}" for line in args.dropped), parsing.as_yaml(args), sep="\n")
        with progress.shown():
            _run(args, argv)


def _run(args, argv):
    """Run the phases of a run in order."""
    startup.import_paddle(args)
    from paddle_resnet import phases
    from paddle_resnet.job import exchange, fleet

    run = phases.Run(args)
    run.start()
    with exchange.exit_barrier():
        fleet.connect(args.comm_timeout_s)
        run.find_start()
        if run.is_done:
            options = args.part(run_report.Options)
            if run_report.all_done(options, run_report.first_entry(args.as_entry(), argv), run.checkpoint):
                report.write_page_of_run(options)
            return
        run.claim_outputs()
        run.prepare()
        run.check_and_describe()
        if args.dry_run:
            logger.info("dry run: flags, data and programs are valid")
        elif run.training is None:
            _evaluate_only(run, argv)
        elif args.benchmark:
            _benchmark_training(run, argv)
        else:
            _run_epochs(run, argv)


def _evaluate_only(run, argv):
    options = run.settings.part(run_report.Options)
    logger.begin(run_report.first_entry(run.settings.as_entry(), argv, run.checkpoint and run.checkpoint.folder))
    result = _evaluate(run, durations.Stop(run.log_evaluated()))
    run_report.conclude(options, argv, result, Mode.EVAL)
    report.write_page_of_run(options)


def _benchmark_training(run, argv):
    logger.begin(run_report.first_entry(run.settings.as_entry(), argv))
    result = _train(run, durations.Stop(0))
    run_report.conclude(run.settings.part(run_report.Options), argv, result, Mode.TRAIN)


def _run_epochs(run, argv):
    """Train up to each position in durations.stops, evaluate or save a checkpoint at the position if either is due, and
    finally log a summary. --patience can end the run earlier."""
    from paddle_resnet.checkpoints.saver import Saver
    from paddle_resnet.passes import all_reduces

    args, checkpoint, schedule = run.settings, run.checkpoint, run.training.lr_scheduler
    options, length = args.part(run_report.Options), args.part(durations.Settings)
    # No local variable refers to run.training, so that enter_stage can free the captured step of the previous stage.
    saver = Saver(args, run.training.program, schedule, run.training.loader, run.training.fetchs, checkpoint)
    run.show_on_tensorboard()
    logger.begin(run_report.first_entry(args.as_entry(), argv), append=run_report.resumes(options, checkpoint))
    is_advised, resumed = False, checkpoint and checkpoint.trained  # metrics if only the evaluation is pending
    for stop in durations.stops(length, schedule.timeline, schedule.done - (resumed is not None)):
        trained, resumed, evaluated = resumed, None, None
        try:
            if trained is None:
                run.enter_stage(stop.epoch, saver)
                trained = _train(run, stop, saver.save)
                if stop.averages_bn:
                    all_reduces.average_bn(run.exe, run.training.program)
                if stop.ends_epoch and not is_advised:
                    is_advised = run_report.advise_on_loader(options, stop.epoch, trained)
            if run.evaluation and stop.evaluates:
                evaluated = _evaluate(run, stop, saver.record)
        except Exception as e:
            saver.save_on_error(e, stop.epoch, stop.step, trained)
            raise
        saver.save_if_due(stop, trained, evaluated)
        if saver.ends_early:
            break
    saver.finish()
    run_report.summarize(options, argv, run.training.program, stop, trained, evaluated, saver)
    report.write_page_of_run(options)


def _train(run, stop, save=None):
    """Train up to the position `stop`, or run the benchmark steps. Return the result of loop.run_and_save."""
    from paddle_resnet import program
    from paddle_resnet.step import loop

    work = run.training
    result = loop.run_and_save(
        *(work.settings.part(loop.Options), work.loader, run.exe, work.compiled, work.fetchs, stop.epoch, Mode.TRAIN),
        *(work.lr_scheduler, save, stop.step),
    )
    if not run.settings.benchmark:
        program.log_info((stop.epoch,), result | stop.place(), Mode.TRAIN)
    return result


def _evaluate(run, stop, is_best=lambda stop, result: True):
    """Evaluate the current parameters, or the EMA weights (--ema) of a run that trains. Return the metrics from
    program.run, except those that are arrays."""
    from paddle_resnet import program

    work, options = run.evaluation, run.settings.part(run_report.Options)
    work.refresh()
    result = program.run(work.settings, work.loader, run.exe, work.compiled, work.fetchs, stop.epoch, Mode.EVAL)
    program.log_info((stop.epoch,), result | stop.place(), Mode.EVAL)
    return run_report.write_classes(options, result, work.loader.class_names, stop.epoch, is_best(stop, result))


if __name__ == "__main__":
    sys.exit(signals.leaving(main()))
