"""Compiled extensions of the official package and of its relatives as modules of the same names and signatures.

As theirs, these functions know no autograd: a forward and a backward, called by an `autograd.Function`. Here a backward
computes from the inputs alone what it officially reads from intermediate results.
"""
