"""Train, evaluate or benchmark: `python train.py --help`, or through `python -m paddle.distributed.launch`."""

import sys

import yaml

import config
import paddle_resnet  # noqa: F401  sets Paddle's environment, so before any import of Paddle
from paddle_resnet.job.processes import check_environment
from utils import logger, signals
from utils.errors import RunError, UsageError
from utils.mode import Mode


def main(argv=None):
    """Run and return the exit code: 0 done, 1 failure, 2 usage, configuration or data, 75 stopped by a signal with all
    work saved, 130 interrupted."""
    try:
        with signals.watched():
            args = config.parse_args(argv)
            if args.print_config:
                print(yaml.safe_dump(config.as_dict(args), sort_keys=False), end="")
                return 0
            _run(args, sys.argv[1:] if argv is None else argv)
    except (UsageError, RunError) as e:
        logger.write_line(f"train.py: error: {e}", sys.stderr)
        return 2 if isinstance(e, UsageError) else 1
    except signals.Preempted as e:
        logger.info(f"stopped by {signals.received() or 'a signal to another process'}{e}")
        return 75
    except KeyboardInterrupt:
        return 130
    finally:
        logger.close()
    return 0


def _run(args, argv):
    check_environment()
    with signals.held_back():
        import paddle  # takes seconds, and so not before the flags are known to be right
    from paddle_resnet.job import exchange, fleet, processes
    from paddle_resnet.native import build as native
    from utils.affinity import bind_to_gpu

    logger.setup(args.report_file, processes.rank())
    processes.resolve_devices(args)
    native.resolve(args)
    if args.enable_cpu_affinity and args.device == "gpu":
        bind_to_gpu(processes.local_gpu())
    if args.show_config:
        logger.info(yaml.safe_dump(config.as_dict(args), sort_keys=False, default_flow_style=None).rstrip())

    paddle.enable_static()
    with exchange.leaving_together():
        fleet.start(args)
        _work(args, argv)


def _work(args, argv):
    import paddle
    from paddle import static

    from paddle_resnet import dali, program, report
    from paddle_resnet.checkpoints import restore, variables
    from paddle_resnet.checkpoints.saver import Saver, check_folder
    from paddle_resnet.job import agreement, processes
    from paddle_resnet.optimizer import cast_evaluation_program, prune
    from paddle_resnet.passes import all_reduces, folding
    from paddle_resnet.steps import trace

    agreement.check_start(args)
    found = restore.find(args)
    trains = args.run_scope.trains
    if trains and found and found.epoch >= args.epochs:
        return report.all_done(args, found)
    evaluates = args.run_scope.evaluates and not (trains and args.benchmark)
    train_loader = dali.build_dataloader(args, Mode.TRAIN, found and found.loader_state) if trains else None
    eval_loader = dali.build_dataloader(args, Mode.EVAL) if evaluates else None
    restore.compare_classes(found, train_loader or eval_loader)
    trace.check(args, train_loader or eval_loader)
    place = processes.place(args)
    exe = static.Executor(place)
    paddle.seed(args.seed)
    if trains:
        train_prog, startup_prog = static.Program(), static.Program()
        train_fetchs, lr_scheduler, _, optimizer = program.build(args, train_prog, startup_prog, len(train_loader))
    if evaluates:
        eval_prog, eval_startup_prog = static.Program(), static.Program()
        eval_fetchs, *_ = program.build(args, eval_prog, eval_startup_prog, 0, is_train=False)
    exe.run(startup_prog if trains else eval_startup_prog)

    main_prog = train_prog if trains else eval_prog
    is_sparse = variables.load_start(args, found, main_prog, place)
    if trains:
        if found is not None:
            restore.restore(args, found, lr_scheduler, train_loader, train_fetchs, place)
        if args.amp:
            optimizer.amp_init(place, scope=static.global_scope())
        if args.prune_model and not is_sparse:
            prune(args, train_prog, place)
        compiled_train = program.compile_prog(args, train_prog, train_fetchs["loss"][0].name)
    if evaluates:
        cast_evaluation_program(args, eval_prog, place)
        refold = folding.fold_batch_norms(args, eval_prog, exe)
        compiled_eval = program.compile_prog(args, eval_prog, is_train=False)
    agreement.check_work(train_loader, eval_loader, main_prog)
    fused = program.fused_operators(args, compiled_train if trains else compiled_eval)
    logger.info(
        report.start_line(args, train_loader, eval_loader, fused, all_reduces.count_gradient_all_reduces(main_prog))
    )
    if args.dry_run:
        check_folder(args)
        logger.info("dry run: flags, data and programs are in order")
        return
    is_saved = trains and not args.benchmark
    saver = Saver(args, train_prog, lr_scheduler, train_loader, train_fetchs, found) if is_saved else None
    logger.begin(config.as_dict(args), goes_on=args.resume)

    def evaluate(epoch):
        refold()
        result = program.run(args, eval_loader, exe, compiled_eval, eval_fetchs, epoch, Mode.EVAL)
        program.log_info((epoch,), result, Mode.EVAL)
        return report.write_classes(args, result, eval_loader.classes)

    if not trains:
        return report.conclude(args, argv, evaluate(max(0, found.epoch - 1) if found else 0), Mode.EVAL)
    if args.benchmark:
        result = program.run(args, train_loader, exe, compiled_train, train_fetchs, 0, Mode.TRAIN, lr_scheduler)
        return report.conclude(args, argv, result, Mode.TRAIN)

    bn_average_prog = all_reduces.build_bn_average(train_prog) if processes.world_size() > 1 else None
    trained = found and found.trained  # not None: the epoch was stopped in its evaluation
    for epoch in range(found.epoch if found else 0, args.epochs):
        is_last = epoch + 1 == args.epochs
        evaluated = None
        try:
            if trained is None:
                trained = program.run_and_save(
                    args, train_loader, exe, compiled_train, train_fetchs, epoch, Mode.TRAIN, lr_scheduler, saver.save
                )
                program.log_info((epoch,), trained, Mode.TRAIN)
                if bn_average_prog is not None:
                    exe.run(bn_average_prog)
            if evaluates and (is_last or (epoch + 1) % args.eval_interval == 0):
                evaluated = evaluate(epoch)
                saver.note(epoch, evaluated)
        except Exception as e:
            saver.rescue(e, epoch, trained)
            raise
        if is_last or (epoch + 1) % args.save_interval == 0:
            saver.save(epoch, None, trained, evaluated)
        last_trained, trained = trained, None
    saver.finish()
    report.summarise(args, argv, last_trained, evaluated, saver.best, saver.folder)


if __name__ == "__main__":
    sys.exit(signals.leaving(main()))
