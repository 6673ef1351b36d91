"""What the budget counts."""

import ast

from tools.size import Size, private_accesses, replaced_attributes, size_of

TEXT = '''"""Two lines
of a module."""

import json  # a comment beside code counts once

# a comment


class Section:
    name: str
    """Name of it."""

    def text(self):
        """What it says."""
        return json.dumps(
            "a string that is no docstring"
        )
'''


def test_comments_blank_lines_and_docstrings_are_no_code():
    assert size_of(TEXT) == Size(lines=7, statements=5, files=1, small=1)


def test_private_names_of_others_and_replaced_attributes_are_counted():
    tree = ast.parse(
        "from a import _b, c\nself._x\nd._y\ne.__dict__\nmonkeypatch.setattr(d, 'z', 1)\nsetattr(d, 'z', 1)"
    )
    assert private_accesses(tree) == 2
    assert replaced_attributes(tree) == 1
