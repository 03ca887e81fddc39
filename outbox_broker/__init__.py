"""The broker: stores messages durably and delivers them to consumer groups. Its public face is engine.engine."""
