#!lua flags=no-writes
-- Counts what is in a slot, and says who serves it.
--
-- Keys:      1  due  2  generation  3  server
-- Arguments: none
-- Returns:   the generation (empty: missing), how many rows there are, how many of them are due, ms until the next one
--            is due (-1: there is none), the text of the server's announcement (empty: there is none), and for how many ms
--            that is valid
-- Invariant: changes nothing.

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
return {
    redis.call('GET', KEYS[2]) or '',
    redis.call('ZCARD', KEYS[1]),
    redis.call('ZCOUNT', KEYS[1], '-inf', now_us),
    first and math.max(0, math.ceil((first - now_us) / 1000)) or -1,
    redis.call('GET', KEYS[3]) or '',
    redis.call('PTTL', KEYS[3]),
}
