"""An applier that makes calls, and an outside that takes them."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from onceward import Event, Handlers, Reject, Transaction
from onceward.apply.outcome import BatchOutcome
from onceward.effects import Call, Effects, EffectWorkers

from tests.contract.bank import Account, Deposited
from tests.onceward.integration import applier
from tests.onceward.integration.test_backlog import QUICK
from tests.servers.waiting import PATIENCE

TOPIC = "deposits"


@dataclass
class Applier(applier.Applier):
    """Takes the place of the consumer's reader, and of the workers of effects."""

    caller: EffectWorkers = field(init=False)

    def __post_init__(self) -> None:
        self.caller = EffectWorkers(self.consume, self.health)
        signals = self.consume.signals
        others = signals.committed

        def committed(outcome: BatchOutcome) -> None:
            others(outcome)
            if outcome.has_calls:
                self.caller.wake()

        signals.committed = committed  # type: ignore[method-assign]

    async def call(self) -> None:
        """Make the calls to the outside that are due, until none is."""
        while await self.caller.work_off():
            pass


NewApplier: TypeAlias = Callable[..., Awaitable[Applier]]


class Received(Event, type="received"):
    """What a customer is to be told of."""

    account: str
    amount: int


@dataclass
class Outside:
    """A bank that tells its customers, and the world that it tells."""

    options: dict[str, Any] = field(default_factory=dict)
    """Of the effect."""
    refused: set[int] = field(default_factory=set)
    """Amounts on which the handler fails after it has staged the call."""
    errors: dict[int, BaseException] = field(default_factory=dict)
    """What the call raises for an amount."""
    waits: dict[int, Callable[[], Awaitable[object]]] = field(default_factory=dict)
    """What the call waits for with an amount."""
    calls: list[int] = field(default_factory=list)
    """Amounts that the outside was called with, in this order."""
    ids: list[tuple[str, int]] = field(default_factory=list)
    """Idempotency keys and attempts, of each call."""
    under_way: int = 0
    handlers: Handlers = field(default_factory=Handlers)

    def __post_init__(self) -> None:
        self.effects = Effects(self.handlers)

        @self.handlers.on(
            Deposited, topic=TOPIC, consumer="deposit", loads=Account.by("account"), policy=QUICK
        )
        async def deposit(event: Deposited, tx: Transaction) -> None:
            account = await tx.load_or_create(Account, event.account)
            account.history += f"{event.amount},"
            tx.call(Received(account=event.account, amount=event.amount), of=account)
            if event.amount in self.refused:
                raise Reject("not this one")

        options: dict[str, Any] = {"policy": QUICK, "timeout": PATIENCE} | self.options

        @self.effects.on(Received, consumer="tell", **options)
        async def tell(event: Received, call: Call) -> str:
            self.calls.append(event.amount)
            self.ids.append((call.id, call.attempt))
            self.under_way += 1
            try:
                if event.amount in self.waits:
                    await self.waits[event.amount]()
                if event.amount in self.errors:
                    raise self.errors[event.amount]
                return f"told {event.account}"
            finally:
                self.under_way -= 1


async def applier_of(new_calling_applier: NewApplier, **options: Any) -> tuple[Outside, Applier]:
    """Return the bank whose effect has these options, and its applier."""
    outside = Outside(options)
    return outside, await new_calling_applier(outside.handlers, topic=TOPIC)
