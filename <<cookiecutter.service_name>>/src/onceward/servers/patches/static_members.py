"""Two members with one `group.instance.id` replace each other, and a leader does not know its role.

What is wrong: brokers report FENCED_INSTANCE_ID in answers to heartbeats of version 3, and since
version 9 of JoinGroup that a static member leads. aiokafka uses older versions.
1. A member that was replaced joins again without its member id, and replaces its successor, at each
   heartbeat.
2. A leader that restarts is told that it follows, so partitions that are added go unnoticed.

To see it: run two consumers with the same `group_instance_id`; restart the only one, and add
partitions.

The change: such a member keeps its member id, which the broker rejects, and a follower joins once
more, to learn whether it leads.
"""

from typing import Any

from aiokafka.consumer.group_coordinator import GroupCoordinator


class Coordinator(GroupCoordinator):  # type: ignore[misc]  # it has no types
    """A member that is fenced if another process takes its `group.instance.id`."""

    member_id: str
    _joined_again = ""
    """The member id with which it joined once more, to learn whether it leads the group."""

    def reset_generation(self) -> None:
        member_id = self.member_id
        super().reset_generation()
        if self._group_instance_id and self._heartbeat_task is not None:
            # With its member id the broker rejects a member that was replaced; without, it would
            # replace its successor.
            self.member_id = member_id

    async def _do_rejoin_group(self, subscription: Any) -> bool:
        before = self._joined_again
        has_joined: bool = await super()._do_rejoin_group(subscription)
        return has_joined and self._joined_again == before

    async def _on_join_complete(self, generation: int, member_id: str, *assigned: Any) -> None:
        is_follower = self._group_subscription is None
        if self._group_instance_id and is_follower and member_id != self._joined_again:
            # The broker tells a leader that has restarted that it leads only when it joins again.
            self._joined_again = member_id
            self.request_rejoin()
        else:
            await super()._on_join_complete(generation, member_id, *assigned)
