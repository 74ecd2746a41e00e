"""`mambakit chat MODEL`: a conversation in the terminal."""

import argparse
import sys
import time
from collections.abc import Generator
from typing import Any

from mambakit.cli.serve import add_model_arguments, load
from mambakit.inference import Engine
from mambakit.serving.answers import Text
from mambakit.text.chat import Chat, Message

EXAMPLE = 'mambakit chat run/model --temperature 0.8 --system "Answer in one sentence."'
HELP = "Enter sends; Ctrl-C stops an answer; /again answers once more, /branch keeps this and goes on in a copy,"
HELP += " /branch N goes to copy N, /quit ends"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parser.add_argument("--max-new-tokens", type=int, default=1024, help="of an answer; default: 1024")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the most likely token; default: 1")
    parser.add_argument("--top-k", type=int, help="of the k most likely tokens only")
    parser.add_argument("--top-p", type=float, help="of the fewest tokens that have this probability together")
    parser.add_argument("--min-p", type=float, help="of tokens this likely, measured by the likeliest")
    parser.add_argument("--repetition-penalty", type=float, help="above 1, makes tokens rarer that were there before")
    parser.add_argument("--seed", type=int, help="the same seed, the same answers")


def run(args: argparse.Namespace) -> None:
    _, _, chat, engine = load(args)
    options = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    talk = Talk(engine, chat, {**options, "max_new_tokens": args.max_new_tokens, "seed": args.seed}, args.system)
    if sys.stdin.isatty():
        print(HELP, file=sys.stderr)
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        command, _, rest = line.strip().partition(" ")
        if not line or command == "/quit":
            break
        if command == "/branch":
            print(talk.branch(rest.strip()), file=sys.stderr)
        elif command == "/again":
            if talk.take_back():
                show(talk)
            else:
                print("there is no answer yet", file=sys.stderr)
        elif command.startswith("/"):
            print(f"{command} is not known: {HELP}", file=sys.stderr)
        elif command:
            talk.say(line.rstrip("\n"))
            show(talk)


def show(talk: "Talk") -> None:
    began, pieces = time.perf_counter(), talk.answer()
    try:
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pieces.close()
    print(flush=True)
    print(talk.figures(time.perf_counter() - began), file=sys.stderr)


class Talk:
    """Conversations that go on from copies of one another; one of them is the present one."""

    def __init__(self, engine: Engine, chat: Chat, options: dict[str, Any], system: str | None):
        self._engine, self._chat, self._options = engine, chat, options
        self._start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._branches: list[list[Message]] = [list(self._start)]
        self._present = 0
        self._request: Any = None

    @property
    def messages(self) -> list[Message]:
        return self._branches[self._present]

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def take_back(self) -> bool:
        """Forget the last answer, if there is one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return False
        self.messages.pop()
        return True

    def branch(self, which: str) -> str:
        """A copy of the present conversation, or the one that is named; a line for the user."""
        if which:
            if not which.isdecimal() or not 1 <= int(which) <= len(self._branches):
                return f"there are branches 1 to {len(self._branches)}"
            self._present = int(which) - 1
        else:
            self._branches.append(list(self.messages))
            self._present = len(self._branches) - 1
        return f"this is branch {self._present + 1} of {len(self._branches)}, with {len(self.messages)} messages"

    def answer(self) -> Generator[str, None, None]:
        """The next message, piece by piece. What has come when it is closed is what was said."""
        rendered = self._chat.render(self.messages)
        stop = [*self._chat.stop_ids, *self._chat.stops] or None
        request = self._engine.add(rendered.ids, stop=stop, ends=rendered.ends, **self._options)
        self._request, text, seen, said = request, Text(self._chat.tokens, self._chat.stops), 0, ""
        try:
            while not request.done:
                self._engine.step()
                new = request.tokens[seen:]
                seen += len(new)
                piece = "".join(text.push(id) for id in new if id not in self._chat.stop_ids)
                said += piece
                if piece:
                    yield piece
            rest = text.end()
            said += rest
            yield rest
        finally:
            request.cancel()
            self._engine.step()
            self.messages.append({"role": "assistant", "content": said})
        if request.error is not None:
            raise request.error

    def figures(self, seconds: float) -> str:
        count = len(self._request.tokens)
        return (
            f"{count} tokens, {count / max(seconds, 1e-9):,.1f} tokens/s, "
            f"{self._request.reused_tokens} of {self._request.prompt_tokens} prompt tokens reused"
        )
