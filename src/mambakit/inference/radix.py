"""A radix tree over token ids: which paths are known, and what is kept where along them."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

WIDTH = array("i").itemsize
"""Bytes of a packed id."""


def pack(ids: Sequence[int]) -> bytes:
    """Token ids in the form that trees take."""
    try:
        return array("i", list(ids) if isinstance(ids, bytes | bytearray) else ids).tobytes()
    except (OverflowError, TypeError) as error:
        raise ValueError(f"expected token ids, whole numbers below 2**31: {error}") from error


def shared(run: bytes, ids: bytes, start: int) -> int:
    """How many bytes `run` and `ids[start:]` have in common at their beginnings; whole ids only."""
    low, high = 0, min(len(run), len(ids) - start)
    if run[:high] == ids[start : start + high]:
        return high
    # Halves are compared at the speed of memcmp, and each is half as long as the one before: linear in all.
    low, high = 0, high // WIDTH
    while high - low > 1:
        middle = (low + high) // 2
        if run[low * WIDTH : middle * WIDTH] == ids[start + low * WIDTH : start + middle * WIDTH]:
            low = middle
        else:
            high = middle
    return low * WIDTH


class Node:
    """A place on known paths: where they part, where something is kept or was, or where one ends."""

    __slots__ = ("children", "end", "parent", "run", "value", "values", "was_evicted")

    def __init__(self, run: bytes, end: int, parent: "Node | None"):
        self.run, self.end, self.parent = run, end, parent
        self.children: dict[bytes, Node] = {}
        self.value: Any = None
        self.values = 0
        """Nodes with a value, from here down."""
        self.was_evicted = False

    @property
    def length(self) -> int:
        """Tokens from the root to here."""
        return self.end // WIDTH


class Tree:
    """Known paths of packed ids, and values at some of their places.

    Of paths that lead to no value at most `max_bare` tokens are remembered; what was looked up longest ago goes first.
    A look-up takes time in proportion to the ids looked up, however many are known.
    """

    def __init__(self, max_bare: int):
        self.root = Node(b"", 0, None)
        self._max_bare = max_bare * WIDTH
        self._bare = 0
        # Ends of paths without a value, oldest first.
        self._tips: OrderedDict[Node, None] = OrderedDict()

    @property
    def bare_tokens(self) -> int:
        return self._bare // WIDTH

    def walk(self, ids: bytes) -> tuple[list[Node], int]:
        """The nodes along `ids`, root first, and how many bytes of `ids` some known path begins with."""
        nodes, at = [self.root], 0
        while at < len(ids):
            child = nodes[-1].children.get(ids[at : at + WIDTH])
            if child is None:
                break
            same = shared(child.run, ids, at)
            at += same
            if same < len(child.run):
                break
            nodes.append(child)
        return nodes, at

    def learn(self, ids: bytes) -> None:
        """Remember that `ids` were looked up."""
        nodes, at = self.walk(ids)
        if at < len(ids):
            self._grow(self._at(nodes[-1], ids, at), ids)
        elif nodes[-1] in self._tips:
            self._tips.move_to_end(nodes[-1])
        self._trim()

    def put(self, ids: bytes, value: Any) -> Node:
        """Keep `value` after `ids`, in the place of what was there."""
        nodes, at = self.walk(ids)
        node = self._at(nodes[-1], ids, at)
        if at < len(ids):
            node = self._grow(node, ids)
        if node.value is None:
            self._tips.pop(node, None)
            for above in ancestry(node):
                self._bare -= 0 if above.values else len(above.run)
                above.values += 1
        node.value, node.was_evicted = value, False
        return node

    def evict(self, node: Node) -> None:
        """Let go of a node's value, but remember that there was one for as long as the path is known."""
        node.value, node.was_evicted = None, True
        for above in ancestry(node):
            above.values -= 1
            self._bare += 0 if above.values else len(above.run)
        if not node.children and node is not self.root:
            self._tips[node] = None
        self._trim()

    def _at(self, node: Node, ids: bytes, at: int) -> Node:
        """The node `at` bytes along `ids`, on the way from `node` to one of its children."""
        if at == node.end:
            return node
        child = node.children[ids[node.end : node.end + WIDTH]]
        middle = Node(child.run[: at - node.end], at, node)
        node.children[middle.run[:WIDTH]] = middle
        child.run, child.parent = child.run[at - node.end :], middle
        middle.children[child.run[:WIDTH]] = child
        middle.values = child.values
        return middle

    def _grow(self, node: Node, ids: bytes) -> Node:
        """The end of `ids`, which go on from `node` where no path does."""
        if node in self._tips and not node.was_evicted:
            self._bare += len(ids) - node.end
            node.run, node.end = node.run + ids[node.end :], len(ids)
            self._tips.move_to_end(node)
            return node
        leaf = Node(ids[node.end :], len(ids), node)
        node.children[leaf.run[:WIDTH]] = leaf
        self._bare += len(leaf.run)
        self._tips.pop(node, None)
        self._tips[leaf] = None
        return leaf

    def _trim(self) -> None:
        while self._bare > self._max_bare:
            tip, _ = self._tips.popitem(last=False)
            above = tip.parent
            assert above is not None
            del above.children[tip.run[:WIDTH]]
            self._bare -= len(tip.run)
            if above is self.root or above.value is not None:
                continue
            if not above.children:
                self._tips[above] = None
                self._tips.move_to_end(above, last=False)
            elif len(above.children) == 1 and not above.was_evicted:
                self._join(above)

    def _join(self, node: Node) -> None:
        """Take out a node at which nothing parts any more."""
        (child,) = node.children.values()
        assert node.parent is not None
        child.run, child.parent = node.run + child.run, node.parent
        node.parent.children[child.run[:WIDTH]] = child


def ancestry(node: Node | None) -> Iterator[Node]:
    """`node`, what it hangs from, and so on to the root."""
    while node is not None:
        yield node
        node = node.parent


def nearest_below(node: Node, counts: Callable[[Any], bool]) -> Iterator[Node]:
    """The nodes below whose value `counts`, with none such between them and `node`."""
    waiting = [child for child in node.children.values() if child.values]
    while waiting:
        below = waiting.pop()
        if below.value is not None and counts(below.value):
            yield below
        else:
            waiting += [child for child in below.children.values() if child.values]
