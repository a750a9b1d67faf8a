"""Regular expressions that compile when they are first used.

A scan imports some 250 patterns and uses a few dozen; compiling all of them would cost more of its
start than looking at a node does (``python -X importtime -m gpuwarden scan``).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, AnyStr

if TYPE_CHECKING:

    def pattern(source: AnyStr, flags: int | re.RegexFlag = 0) -> re.Pattern[AnyStr]:
        """``re.compile``, later: usable as a compiled pattern's methods and attributes are."""
        ...

else:

    class pattern:  # noqa: N801
        """``re.compile``, later: usable as a compiled pattern's methods and attributes are."""

        def __init__(self, source: str | bytes, flags: int = 0) -> None:
            self._source = source
            self._flags = flags

        def __getattr__(self, name: str) -> Any:
            # Reached once a name: afterwards the bound method of the compiled pattern is found.
            compiled = self.__dict__.get("_compiled")
            if compiled is None:
                compiled = self.__dict__["_compiled"] = re.compile(self._source, self._flags)
            value = self.__dict__[name] = getattr(compiled, name)
            return value
