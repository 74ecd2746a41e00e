"""Models on the hub: what goes up, with a card made from a run's own records."""

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mambakit.checkpoints import load_model, save_model
from mambakit.checkpoints.card import CARD, Record, card
from mambakit.checkpoints.files import find_directory, read_json
from mambakit.checkpoints.writing import replacing
from mambakit.models.language_model import LanguageModel
from mambakit.models.pretrained import WAYS
from mambakit.optional import need
from mambakit.text.tokens import copy_description

RUN = "run.json"
NAME = r"[\w.-]+/[\w.-]+"


def push_to_hub(
    model: LanguageModel | str | os.PathLike[str],
    name: str,
    *,
    run: str | os.PathLike[str] | None = None,
    license: str | None = None,
    base_model: str | None = None,
    tags: Sequence[str] = (),
    private: bool | None = None,
    revision: str | None = None,
    message: str = "Upload a model of mambakit",
    token: str | None = None,
    endpoint: str | None = None,
) -> str:
    """Publish a model, or that in a folder, under a name like `owner/model`; the address of what was uploaded.

    Safetensors, `config.json`, the files of its tokenizer where it is given as a folder or `run` is, and a card: data,
    steps and bits per byte are those of `run`, a training run's folder, by default the one that the model lies in.

    Examples:
        >>> mk.push_to_hub("run/model", "no owner")
        Traceback (most recent call last):
        ValueError: 'no owner' is no name on the hub, expected one like owner/model
    """
    if not re.fullmatch(NAME, name):
        raise ValueError(f"{name!r} is no name on the hub, expected one like owner/model")
    hub = need("publishing", "huggingface_hub")
    api = hub.HfApi(endpoint=endpoint, token=token)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "model")
        write_published(model, folder, name, run=run, license=license, base_model=base_model, tags=tags)
        try:
            api.create_repo(name, private=private, exist_ok=True)
            if revision is not None:
                api.create_branch(name, branch=revision, exist_ok=True)
            done = api.upload_folder(repo_id=name, folder_path=folder, commit_message=message, revision=revision)
        except Exception as error:  # the hub's client raises its own and its transport's
            reason = str(error).strip().split("\n")[0]
            raise ValueError(f"{name} was not published, the hub did not take it: {reason}") from error
    return str(done.commit_url)


def write_published(
    model: LanguageModel | str | os.PathLike[str],
    folder: Path,
    name: str,
    *,
    run: str | os.PathLike[str] | None = None,
    **given: Any,
) -> None:
    """What `push_to_hub` uploads, into a new folder."""
    source = None
    if not isinstance(model, LanguageModel):
        source = find_directory(model)
        model = load_model(source)
    if run is None and source is not None:
        run = next((place for place in (source, source.parent) if (place / RUN).is_file()), None)
    record = Record() if run is None else read_record(Path(run))
    record = replace(record, **{field: value for field, value in given.items() if value})
    if source is None and run is not None:
        source = find_directory(run)
    with replacing(folder, lambda _: False) as fresh:
        save_model(model, fresh)
        if source is not None:
            copy_description(source, fresh)
        (fresh / CARD).write_text(card(model, name, record), encoding="utf-8")


def read_record(run: Path) -> Record:
    """What the folder of a training run says of it."""
    # Here, since training brings along more of torch than who publishes nothing should wait for.
    from mambakit.training.run import LOG, read_log

    options = read_json(run / RUN)
    lines = read_log(run / LOG)
    bits = [line["bits_per_byte"] for line in lines if isinstance(line.get("bits_per_byte"), float)]
    data, init, counts = options.get("data"), options.get("init"), (options.get("batch"), options.get("seq_len"))
    both = [count for count in counts if isinstance(count, int)]
    return Record(
        # Names alone: where they lay on somebody's disk concerns nobody.
        data=[Path(path).name for path in data] if isinstance(data, list) and data else ["Python's standard library"],
        text_hash=options["text"] if isinstance(options.get("text"), str) else None,
        steps=max((line["step"] for line in lines), default=None),
        tokens_per_step=both[0] * both[1] if len(both) == 2 else None,
        bits_per_byte=bits[-1] if bits else None,
        optimizer=options["optimizer"] if isinstance(options.get("optimizer"), str) else None,
        base_model=init if isinstance(init, str) and re.fullmatch(NAME, init) and not Path(init).exists() else None,
    )


WAYS.update(from_pretrained=load_model, save_pretrained=save_model, push_to_hub=push_to_hub)
