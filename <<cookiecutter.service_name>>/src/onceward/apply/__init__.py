"""The one transaction: inbox marker, handlers, backlog and outbox."""
