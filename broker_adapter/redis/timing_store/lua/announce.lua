#!lua flags=allow-oom
-- Records who serves a slot.
--
-- Keys:      1  server: a string
-- Arguments: 1  its text  2  for how many ms
-- Returns:   1
-- Invariant: the latest announcement replaces the one before, and none outlives its time.

redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
