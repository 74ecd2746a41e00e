"""The official functions that end in `_ref`, as plain loops: nothing is shared with the operations they check.

They compute in at least float32 unless they say otherwise, and are as slow as they look.
"""
