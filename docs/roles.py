"""For mkdocs.yml: what docstrings write as Sphinx would have it (:func:`name`, ``::``) in Markdown."""

import re
from typing import Any

import griffe


class Roles(griffe.Extension):
    """Changes the docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Roles become code, a literal block's two colons become one."""
        if obj.docstring is not None:
            text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"::\n\n", ":\n\n", text)
