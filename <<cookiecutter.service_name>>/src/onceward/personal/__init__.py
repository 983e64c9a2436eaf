"""Personal data: fields of events that tables and the archive hold encrypted, by a key per subject.

A subject is the person that a field is about. To forget a subject deletes its key, and what was
stored of it can't be decrypted any more. See `docs/personal-data.md`.
"""

from .encryption import PersonalData
from .erasing import forget
from .keys import MasterKeys
from .marks import Personal
from .settings import PersonalSettings

__all__ = ["MasterKeys", "Personal", "PersonalData", "PersonalSettings", "forget"]
