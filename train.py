"""Train, evaluate or benchmark: `python train.py --help`, or through `python -m paddle.distributed.launch`."""

import os
import shlex
import sys

import yaml

import config
import paddle_resnet  # noqa: F401  sets Paddle's environment, so before any import of Paddle
from utils import logger
from utils.errors import UsageError
from utils.mode import Mode, RunScope


def main(argv=None):
    """Run and return the exit code: 0 done, 2 usage, configuration or data, 130 interrupted."""
    try:
        args = config.parse_args(argv)
        if args.print_config:
            print(yaml.safe_dump(config.as_dict(args), sort_keys=False), end="")
            return 0
        _run(args, sys.argv[1:] if argv is None else argv)
    except UsageError as e:
        print(f"train.py: error: {e}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        logger.close()
    return 0


def _run(args, argv):
    # Paddle and DALI take seconds to import: not before the flags are known to be right.
    import paddle
    from paddle import static

    from paddle_resnet import checkpoint, dali, distributed, program
    from paddle_resnet.optimizer import cast_evaluation_program, prune
    from utils.affinity import bind_to_gpu

    logger.setup(args.report_file, distributed.rank())
    distributed.resolve_devices(args)
    if args.enable_cpu_affinity and args.device == "gpu":
        bind_to_gpu(distributed.local_gpu())
    logger.log("PARAMETER", config.as_dict(args))
    if args.show_config:
        logger.info(yaml.safe_dump(config.as_dict(args), sort_keys=False, default_flow_style=None).rstrip())

    paddle.enable_static()
    distributed.start(args)
    trains = args.run_scope.trains
    evaluates = args.run_scope.evaluates and not (trains and args.benchmark)
    train_loader = dali.build_dataloader(args, Mode.TRAIN) if trains else None
    eval_loader = dali.build_dataloader(args, Mode.EVAL) if evaluates else None

    place = distributed.place(args)
    exe = static.Executor(place)
    start_epoch, lr_scheduler = 0, None
    paddle.seed(args.seed)
    if trains:
        train_prog, startup_prog = static.Program(), static.Program()
        train_fetchs, lr_scheduler, _, optimizer = program.build(args, train_prog, startup_prog, len(train_loader))
    if evaluates:
        eval_prog, eval_startup_prog = static.Program(), static.Program()
        eval_fetchs, *_ = program.build(args, eval_prog, eval_startup_prog, 0, is_train=False)
    exe.run(startup_prog if trains else eval_startup_prog)

    if args.from_checkpoint is not None:
        start_epoch = checkpoint.load(args, train_prog if trains else eval_prog, lr_scheduler, place)
    elif args.from_pretrained_params is not None:
        checkpoint.load_pretrained(args, train_prog if trains else eval_prog, place)
    if trains and start_epoch >= args.epochs:
        raise UsageError(f"--epochs {args.epochs} are done in {args.from_checkpoint}: give more than {start_epoch}")
    if trains:
        if args.amp:
            optimizer.amp_init(place, scope=static.global_scope())
        if args.prune_model:
            prune(args, train_prog, place)
        compiled_train = program.compile_prog(args, train_prog, train_fetchs["loss"][0].name)
    if evaluates:
        cast_evaluation_program(args, eval_prog, place)
        compiled_eval = program.compile_prog(args, eval_prog, is_train=False)
    logger.info(_start_line(args, distributed.world_size(), train_loader, eval_loader))
    if args.dry_run:
        logger.info("dry run: flags, data and programs are in order")
        return

    def evaluate(epoch):
        result = program.run(args, eval_loader, exe, compiled_eval, eval_fetchs, epoch, Mode.EVAL)
        program.log_info((epoch,), result, Mode.EVAL)
        return result

    if not trains:
        program.log_info((), evaluate(max(0, start_epoch - 1)), Mode.EVAL)
        return
    if args.benchmark:
        result = program.run(args, train_loader, exe, compiled_train, train_fetchs, 0, Mode.TRAIN, lr_scheduler)
        program.log_info((), result, Mode.TRAIN)
        return

    checkpoint.prepare(args)
    result, best, folder = None, None, None
    bn_average_prog = distributed.build_bn_average(train_prog) if distributed.world_size() > 1 else None
    for epoch in range(start_epoch, args.epochs):
        is_last = epoch + 1 == args.epochs
        trained = program.run(args, train_loader, exe, compiled_train, train_fetchs, epoch, Mode.TRAIN, lr_scheduler)
        program.log_info((epoch,), trained, Mode.TRAIN)
        if bn_average_prog is not None:
            exe.run(bn_average_prog)
        if evaluates and (is_last or (epoch + 1) % args.eval_interval == 0):
            result = evaluate(epoch)
            if best is None or result["top1"] > best["top1"]:
                best = {"epoch": epoch, **result}
        if distributed.rank() == 0 and (is_last or (epoch + 1) % args.save_interval == 0):
            folder = checkpoint.save(args, train_prog, epoch, lr_scheduler)
            logger.info(f"checkpoint: {folder}")
    _summarise(args, argv, trained, result, best, folder)


def _start_line(args, world_size, train_loader, eval_loader):
    precision = ("float16 O2" if args.use_pure_fp16 else "float16 O1") if args.amp else "float32"
    loaders = {"train": train_loader, "val": eval_loader}
    sizes = [f"{name} {len(loader)} steps an epoch" for name, loader in loaders.items() if loader is not None]
    return (
        f"{args.model_arch_name} on {world_size} x {args.device}, {precision}, {args.data_layout}, batch "
        f"{args.batch_size} a process, peak lr {args.lr} x {world_size} = {args.lr * world_size:g}, {', '.join(sizes)}"
    )


def _summarise(args, argv, trained, result, best, folder):
    data = {f"train.{name}": trained[name] for name in ("loss", "top1", "top5", "ips")}
    if result is not None:
        data |= {f"val.{name}": result[name] for name in ("loss", "top1", "top5", "images")}
        data |= {"best.epoch": best["epoch"], "best.val.top1": best["top1"]}
    logger.log((), data)
    logger.info(f"last checkpoint: {folder}\nreport: {args.report_file}")
    if args.from_checkpoint is None and args.from_pretrained_params is None:
        flags = [*argv, "--run-scope", RunScope.EVAL_ONLY.value, "--from-checkpoint", str(folder)]
        logger.info(f"evaluate it again: {_python()} train.py {shlex.join(flags)}")


def _python():
    path = os.path.relpath(sys.executable)
    return "python" if path.startswith("..") else path


if __name__ == "__main__":
    sys.exit(main())
