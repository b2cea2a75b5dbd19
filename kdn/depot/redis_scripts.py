"""What RedisNames does on the server: scripts, each of which happens as a whole or not at all.

All keys share one hash tag, so that a Cluster keeps them on one shard: a change of a name, the
totals of its tenant and the feed of all changes are one transaction. A script decides before it
writes. Every write has an `id`; one that is sent again, because its answer was lost, is answered
with what the first one did.

    sequence, first        the changes (first, sequence] are known
    changes                sorted set: "tenant name version etag" by sequence
    removals, kept         the removed objects of (kept, removals] are known
    removed                sorted set: keys by their number
    done:ID                what a write answered, for a while
    T:order                sorted set of names, of tenant T
    T:newest               hash: name to record ("version etag created_s size_bytes")
    T:totals               hash: names, size_bytes, chunks; num_objects, objects_bytes, recounted_s;
                           changed: the sequence of the tenant's last change
    T:users                hash: chunk to the number of names that use it
    T:N:versions           hash: version to record, of name N
    T:N:manifests          hash: version to manifest
    T:N:uses               hash: chunk to the last version that uses it
"""

_PRELUDE = """
local call = redis.call
local DONE_S = 300
local function done(result)
    call('SET', KEYS[1], result, 'EX', DONE_S)
    return result
end
local before = call('GET', KEYS[1])
if before then
    call('EXPIRE', KEYS[1], DONE_S) -- a write of this connection: WAIT has something to wait for
    return before
end
local function number(value) return string.format('%.0f', value) end
local function next_of(counter, first, start)
    if call('EXISTS', counter) == 0 then call('MSET', counter, start, first, start) end
    return call('INCR', counter)
end
"""

_NAMES = (
    _PRELUDE
    + """
local sequence, first, changes = KEYS[2], KEYS[3], KEYS[4]
local order, newest, totals, users = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local versions, manifests, uses = KEYS[9], KEYS[10], KEYS[11]
local tenant, name, expected = ARGV[1], ARGV[2], ARGV[3]
local start, max_changes = ARGV[4], tonumber(ARGV[5])
local record = call('HGET', newest, name)
local etag = record and string.match(record, '^%S+ (%S+)') or ''
if etag ~= expected then return 'moved' end
local function size_of(one) return tonumber(string.match(one, '(%S+)$')) end
local function add(what, number)
    if number ~= 0 then call('HINCRBY', totals, what, number) end
end
local function forget(up_to)
    local size = 0
    for _, version in ipairs(call('HKEYS', versions)) do
        if tonumber(version) <= up_to then
            size = size + size_of(call('HGET', versions, version))
            call('HDEL', versions, version)
            call('HDEL', manifests, version)
        end
    end
    if size == 0 and up_to < 1 then return end
    local all, unused = call('HGETALL', uses), 0
    for i = 1, #all, 2 do
        if tonumber(all[i + 1]) <= up_to then
            call('HDEL', uses, all[i])
            if call('HINCRBY', users, all[i], -1) <= 0 then call('HDEL', users, all[i]) end
            unused = unused + 1
        end
    end
    add('size_bytes', -size)
    add('chunks', -unused)
end
local function tell(version, new_etag)
    local now = next_of(sequence, first, start)
    call('HSET', totals, 'changed', number(now))
    local told = table.concat({number(now), tenant, name, version, new_etag}, ' ')
    call('ZADD', changes, number(now), told)
    local gone = number(now - max_changes)
    if call('ZREMRANGEBYSCORE', changes, '-inf', gone) > 0 then call('SET', first, gone) end
end
"""
)

PUT = (
    _NAMES
    + """
local version, made, manifest = tonumber(ARGV[6]), ARGV[7], ARGV[8]
local forgotten = version - tonumber(ARGV[9])
local most = {names = tonumber(ARGV[10]), size_bytes = tonumber(ARGV[11]),
              chunks = tonumber(ARGV[12])}
local FIRST = 13
local have, new, added = {}, {}, 0
for _, what in ipairs({'names', 'size_bytes', 'chunks'}) do
    have[what] = tonumber(call('HGET', totals, what) or '0')
end
for i = FIRST, #ARGV do
    new[ARGV[i]] = true
    if call('HEXISTS', uses, ARGV[i]) == 0 then added = added + 1 end
end
have.names = have.names + (record and 0 or 1)
have.size_bytes = have.size_bytes + #manifest
have.chunks = have.chunks + added
local function beyond()
    for _, what in ipairs({'names', 'size_bytes', 'chunks'}) do
        if have[what] > most[what] then
            return what .. ' of all names: ' .. number(have[what]) .. ' would be more than '
                .. number(most[what])
        end
    end
end
local refusal = most.names >= 0 and beyond()
if refusal then
    local last, all = {}, call('HGETALL', uses)
    for i = 1, #all, 2 do
        if not new[all[i]] then last[all[i + 1]] = (last[all[i + 1]] or 0) + 1 end
    end
    local known = call('HKEYS', versions)
    table.sort(known, function(a, b) return tonumber(a) < tonumber(b) end)
    for _, old in ipairs(known) do
        if not refusal then break end
        have.size_bytes = have.size_bytes - size_of(call('HGET', versions, old))
        have.chunks = have.chunks - (last[old] or 0)
        forgotten = math.max(forgotten, tonumber(old))
        refusal = beyond()
    end
    if refusal then return 'quota ' .. refusal end
end
call('HSET', versions, ARGV[6], made)
call('HSET', manifests, ARGV[6], manifest)
for i = FIRST, #ARGV do
    if call('HSET', uses, ARGV[i], ARGV[6]) == 1 then call('HINCRBY', users, ARGV[i], 1) end
end
add('names', record and 0 or 1)
add('size_bytes', #manifest)
add('chunks', added)
call('ZADD', order, 0, name)
call('HSET', newest, name, made)
if forgotten >= 1 then forget(forgotten) end
tell(ARGV[6], string.match(made, '^%S+ (%S+)'))
return done('made')
"""
)

DELETE = (
    _NAMES
    + """
local version = string.match(record, '^(%S+)')
forget(tonumber(version))
call('DEL', versions, manifests, uses)
call('HDEL', newest, name)
call('ZREM', order, name)
add('names', -1)
tell(version, '-')
return done('deleted')
"""
)

COUNT = (
    _PRELUDE
    + """
local function count(what, more)
    local now = call('HINCRBY', KEYS[2], what, more)
    if now < 0 then call('HSET', KEYS[2], what, 0) end
    return math.max(now, 0)
end
local objects, bytes = count('num_objects', ARGV[1]), count('objects_bytes', ARGV[2])
local names = tonumber(call('HGET', KEYS[2], 'size_bytes') or '0')
return done(number(objects) .. ' ' .. number(bytes + names))
"""
)

RECOUNT = (
    _PRELUDE
    + """
local last = tonumber(call('HGET', KEYS[2], 'recounted_s') or '0')
if tonumber(ARGV[1]) - last < tonumber(ARGV[2]) then return 'not yet' end
call('HSET', KEYS[2], 'recounted_s', ARGV[1])
return done('yours')
"""
)

REMOVE = (
    _PRELUDE
    + """
local counter, kept, removed = KEYS[2], KEYS[3], KEYS[4]
local now
for i = 3, #ARGV do
    now = next_of(counter, kept, ARGV[1])
    call('ZADD', removed, number(now), number(now) .. ' ' .. ARGV[i])
end
local gone = number(now - tonumber(ARGV[2]))
if call('ZREMRANGEBYSCORE', removed, '-inf', gone) > 0 then call('SET', kept, gone) end
return done('told')
"""
)

BEGIN = """
if redis.call('EXISTS', KEYS[1]) == 0 then
    redis.call('MSET', KEYS[1], ARGV[1], KEYS[2], ARGV[1])
end
return {redis.call('GET', KEYS[2]), redis.call('GET', KEYS[1])}
"""
"""(first, last) of a feed, which there is from now on."""

AFTER = """
local first, last = redis.call('GET', KEYS[2]), redis.call('GET', KEYS[1])
if not last then return {} end
local found = redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. ARGV[1], '+inf', 'LIMIT', 0, ARGV[2])
return {first, last, found}
"""

PAGE = """
local names = redis.call('ZRANGEBYLEX', KEYS[1], ARGV[1], ARGV[2], 'LIMIT', 0, ARGV[3])
local found = {}
for i, name in ipairs(names) do
    found[2 * i - 1] = name
    found[2 * i] = redis.call('HGET', KEYS[2], name)
end
return found
"""

CHUNKS = """
local chunks = redis.call('HKEYS', KEYS[1])
local found = {}
for i, chunk in ipairs(chunks) do
    found[2 * i - 1] = chunk
    found[2 * i] = redis.call('HGET', KEYS[2], chunk)
end
return found
"""

MANIFEST = """
return {redis.call('HGET', KEYS[1], ARGV[1]), redis.call('HGET', KEYS[2], ARGV[1])}
"""

NEWEST = """
return {redis.call('HGET', KEYS[1], ARGV[1]), redis.call('HGETALL', KEYS[2])}
"""
