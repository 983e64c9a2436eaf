"""Effects: calls to the outside, made after the commit of the transaction that staged them.

`registration` declares which function makes the calls of an event, `calls` makes one and settles
it, `workers` serves the lanes of the backlog that hold them. The engine knows none of it: it stores
what `tx.call` stages, and a service names the workers in its `Service(…, workers=…)`.
"""

from .registration import Call, Effects
from .settings import EffectSettings
from .workers import EffectWorkers

__all__ = ["Call", "EffectSettings", "EffectWorkers", "Effects"]
