"""What an operator of a program's groups sees and does."""

from __future__ import annotations

from outbox_core import BrokerAdmin
from tests.outbox.consumer_model.program import TOPIC, Event, Program, Step


def is_settled(admin: BrokerAdmin, plan: Program) -> bool:
    """Whether no group has anything left to do."""
    figures = [admin.figures(TOPIC, group.name) for group in plan.groups]
    return all(figure["backlog"] == 0 and figure["in_flight"] == 0 for figure in figures)


def administrate(admin: BrokerAdmin, step: Step) -> None:
    """What an operator does to a group. A pause lasts to the end of all steps."""
    if step.event is Event.PAUSE:
        admin.pause(TOPIC, step.group, paused=True)
    elif step.event is Event.REDRIVE:
        admin.redrive(TOPIC, step.group)
    else:
        admin.seek(TOPIC, step.group, to_offset=0)
