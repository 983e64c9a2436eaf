"""The test kit: a service's handlers against a real PostgreSQL, without Kafka.

`plugin` is a pytest plugin with the fixture `harness`. The rest of the engine does not import this
package.
"""

from .errors import HarnessMisused
from .harness import Harness
from .observed import Increment
from .outcome import Failure, Outcome, Published, Scheduled
from .records import Sent
from .stored import DeadLetter

__all__ = [
    "DeadLetter",
    "Failure",
    "Harness",
    "HarnessMisused",
    "Increment",
    "Outcome",
    "Published",
    "Scheduled",
    "Sent",
]
