"""The broker's log and schedule beside embedded storage engines. Not beside brokers: those are in benchmarks.broker."""
