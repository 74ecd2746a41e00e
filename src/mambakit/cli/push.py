"""`mambakit push MODEL OWNER/NAME`."""

import argparse
from pathlib import Path

from mambakit.cli.convert import model_folder
from mambakit.cli.quantize import new_folder
from mambakit.training.publishing import push_to_hub, write_published

EXAMPLE = "mambakit push run someone/my-model --license mit --private"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a checkpoint's folder, or a run's")
    parser.add_argument("name", metavar="OWNER/NAME", help="what it is called on the hub")
    parser.add_argument("--license", help="of the weights, as the hub spells it: mit, apache-2.0, ...")
    parser.add_argument("--run", metavar="DIR", help="the training run for the card; default: the one MODEL lies in")
    parser.add_argument("--base-model", metavar="OWNER/NAME", help="what it was made of; default: the run's --init")
    parser.add_argument("--tag", action="append", default=[], dest="tags", help="for the card; may be repeated")
    parser.add_argument("--private", action="store_true", default=None, help="for nobody else to see")
    parser.add_argument("--revision", metavar="BRANCH", help="a branch to upload to; default: main")
    parser.add_argument("--folder", metavar="DIR", help="write here what would go up, and upload nothing")


def run(args: argparse.Namespace) -> None:
    told = {name: getattr(args, name) for name in ("license", "run", "base_model", "tags")}
    if args.folder is None:
        print(push_to_hub(model_folder(args.model), args.name, private=args.private, revision=args.revision, **told))
        return
    folder = new_folder(args.folder)
    write_published(model_folder(args.model), folder, args.name, **told)
    for path in sorted(Path(folder).iterdir()):
        print(f"{path}: {path.stat().st_size:,} bytes")
