"""A griffe extension: signatures as a caller may use them, without parameters that serve error messages alone."""

from __future__ import annotations

from typing import Any

import griffe


class PublicSignatures(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Removes `**unknown`, which takes misspelt arguments, and the default of arguments that must be given."""
        func.parameters = griffe.Parameters(*(p for p in func.parameters if p.name != "unknown"))
        for parameter in func.parameters:
            if str(parameter.default) == "NOT_GIVEN":
                parameter.default = None

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Removes what the constructor assigns to an attribute: it is not a default."""
        if "class-attribute" not in attr.labels:
            attr.value = None
