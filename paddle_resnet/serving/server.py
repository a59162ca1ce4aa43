"""Serve a model for `predict --serve`: predictions and heat maps for the web application in web.py."""

import argparse
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

from paddle_resnet.data import bad_images
from paddle_resnet.serving import heat_maps, image_files, web
from paddle_resnet.serving.model import Model
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, printable


def serve(args: argparse.Namespace, model: Model, device: str, listener: socket.socket) -> None:
    """Answer requests until a signal stops the server.

    Args:
        args: flags of the command.
        model: the network, for batches of one image.
        device: "cpu" or "gpu".
        listener: result of web.listen.
    """

    def classify(upload):
        options = 1, device, args.dali_num_threads, web.Upload.read
        [(_, row, problem)] = image_files.predict(model, [upload], *options)
        return (None, problem) if row is None else (model.predicted_classes(row[None])[0], None)

    def heat_map(upload, label):
        try:
            return heat_maps.overlay(maps, upload.content, label)
        except heat_maps.Unreadable as e:
            logger.write_line(printable(f"{upload} {e}"), sys.stderr)
            return None

    maps = None
    try:
        if args.tta != "none":
            raise UsageError(f"--tta {args.tta} averages two predictions")
        maps = heat_maps.open_model(args.model, device, args.model_arch_name)
    except UsageError as e:
        logger.write_line(printable(f"the page shows no heat maps: {e}"), sys.stderr)
    worker, blank = ThreadPoolExecutor(1), web.blank_image()
    worker.submit(classify, blank).result()  # the first image takes longest, so a user should not have to wait for it
    if maps is not None:
        worker.submit(heat_map, blank, 0).result()
    limits = 10**6 * args.serve_max_mb, args.serve_max_images, web.allowed_hosts(listener, args.serve_host)
    app = web.create_app(classify, worker, model.description, *limits, heat_map=maps and heat_map)
    if not web.is_loopback(listener):
        logger.warn(
            f"--serve-host {args.serve_host}: other machines can access the model without password or encryption; "
            "restrict access with a firewall"
        )
    line = f"{web.url(listener)}: page to try {args.model}; press Control-C to stop the server"
    with bad_images.decoders_silenced():
        try:
            web.serve(app, listener, lambda: logger.write_line(line, sys.stdout))
        finally:
            worker.shutdown(wait=False, cancel_futures=True)
