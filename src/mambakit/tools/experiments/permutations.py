"""The alternating group A5: its 60 elements as tuples, and where two generators lead from each."""

Permutation = tuple[int, ...]
IDENTITY: Permutation = (0, 1, 2, 3, 4)
GENERATORS: tuple[Permutation, ...] = ((1, 2, 3, 4, 0), (1, 2, 0, 3, 4))
"""A turn of all five and a turn of three: even both, and together they reach every even permutation."""


def compose(later: Permutation, earlier: Permutation) -> Permutation:
    return tuple(later[i] for i in earlier)


def elements() -> list[Permutation]:
    """In the order in which words reach them, the identity first."""
    found = [IDENTITY]
    for element in found:
        for generator in GENERATORS:
            following = compose(generator, element)
            if following not in found:
                found.append(following)
    return found


def after_each() -> list[list[int]]:
    """`[element][generator]`: the element after that generator, by number."""
    found = elements()
    return [[found.index(compose(generator, element)) for generator in GENERATORS] for element in found]
