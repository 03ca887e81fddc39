#!lua flags=allow-oom
-- Forgets a topic.
--
-- Keys:      1  the hash of all topics
-- Arguments: 1  the topic
-- Returns:   1 if it was registered, else 0
-- Invariant: repeating it does nothing.

return redis.call('HDEL', KEYS[1], ARGV[1])
