"""One module that was found becomes what the child answers of it."""

from __future__ import annotations

from collections.abc import Callable

from gpuwarden.code.describe import describe, describe_broken
from gpuwarden.code.judgement import ModuleJudgement
from gpuwarden.code.located import Located
from gpuwarden.code.module import Module, Place
from gpuwarden.code.standing import Assessor
from gpuwarden.codescan.streams import Budget, Exhausted
from gpuwarden.codescan.tasks import Answer, Assess, Found, Image, Said, Settings
from gpuwarden.errors import Malformed

_TOO_MUCH = "more memory is needed than is allowed"


class ModuleAnswers:
    """Describes and assesses modules within one task's budget."""

    def __init__(
        self,
        settings: Settings,
        assess: Assess | None,
        send: Callable[[Answer], None],
        trouble: Callable[[Place, str, str], None],
        budget: Budget,
    ) -> None:
        self._settings = settings
        self._assess = assess
        self._known = None
        if settings.brief and isinstance(assess, Assessor):
            self._known = assess.knows
        self._send = send
        self._trouble = trouble
        self._budget = budget

    def tell(self, located: Located) -> None:
        """Sends what the module is and where it stands. Errors: Exhausted."""
        bounds = self._settings.bounds
        image: bytes | memoryview = b""
        whole: bytes | memoryview = located.stored
        try:
            image = located.image(bounds)
            self._budget.take(len(image))
            module = describe(
                located, image, bounds, known=self._known, kernels=self._settings.kernels
            )
            whole = image
        except Exhausted:
            raise
        except Malformed as error:
            module = describe_broken(located, str(error))
        except MemoryError:
            module = describe_broken(located, _TOO_MUCH)
        standing, known_as, judgement, *more = self._assessed(module, image)
        self._send(
            Found(
                module=module,
                standing=standing,
                known_as=known_as,
                judgement=judgement,
                standings=more[0] if more else (),
            )
        )
        keep = self._settings.keep
        if keep is not None and keep.takes(module, standing, len(whole)):
            self._send(Image(digest=module.digest, data=bytes(whole)))

    def _assessed(self, module: Module, image: bytes | memoryview) -> Said:
        if self._assess is None:
            return "", "", None
        try:
            return self._assess(module, image)
        except MemoryError:
            reason = _TOO_MUCH
        except Exception as error:  # noqa: BLE001
            # The module is there all the same, and nobody vouches for it.
            reason = f"{type(error).__name__}: {error}"
        self._trouble(module.place, "judging", reason)
        return "unknown", "", ModuleJudgement(answer="unreadable", reasons=(reason,))
