-- Documents in Redis: one call of this script is one atomic operation. `DocumentStore` in `storage/base.py` is the
-- contract.
--
-- KEYS[1] is a tenant's prefix, wp:{tenant}. All keys below begin with the prefix, so they are in one hash slot:
--   :document:<name>   hash   head and body
--   :documents         zset   the names, by the time of their expiry in milliseconds
--   :document_bytes    hash   the bytes of each document, in =<name>, and of all together, in total
--
-- ARGV: operation, name, then the operation's arguments. Redis expires documents. The next put or delete removes the
-- names of expired documents from the two lists.

local FORGOTTEN_AT_ONCE = 100

local prefix, operation, id = KEYS[1], ARGV[1], ARGV[2]
local names, sizes = prefix .. ':documents', prefix .. ':document_bytes'
local time = redis.call('TIME')
local now = math.floor(time[1] * 1000 + time[2] / 1000)

local function delete(name)
  local size = redis.call('HGET', sizes, '=' .. name)
  if size then
    redis.call('HDEL', sizes, '=' .. name)
    redis.call('HINCRBY', sizes, 'total', -size)
  end
  redis.call('ZREM', names, name)
  return redis.call('DEL', prefix .. ':document:' .. name)
end

-- Deletes the documents that expire soonest until `size` bytes fit. If Redis has evicted one of the two lists, they
-- disagree, and the byte counts are reset.
local function make_room(size, max_bytes)
  while tonumber(redis.call('HGET', sizes, 'total') or 0) + size > max_bytes do
    local oldest = redis.call('ZRANGE', names, 0, 0)[1]
    if not oldest then
      redis.call('DEL', sizes)
      return
    end
    delete(oldest)
  end
end

local function keep_until(key, time)
  if redis.call('PEXPIRETIME', key) < time then
    redis.call('PEXPIREAT', key, time)
  end
end

for _, name in ipairs(redis.call('ZRANGEBYSCORE', names, '-inf', now, 'LIMIT', 0, FORGOTTEN_AT_ONCE)) do
  delete(name)
end
if operation == 'delete_some' then
  local some = redis.call('ZRANGE', names, 0, tonumber(ARGV[3]) - 1)
  for _, name in ipairs(some) do
    delete(name)
  end
  return #some
end
local deleted = delete(id)
if operation == 'put' then
  local head, body, milliseconds, max_bytes = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
  local key, size, until_ = prefix .. ':document:' .. id, #id + #head + #body, now + milliseconds
  make_room(size, max_bytes)
  redis.call('HSET', key, 'head', head, 'body', body)
  redis.call('PEXPIREAT', key, until_)
  redis.call('ZADD', names, until_, id)
  redis.call('HSET', sizes, '=' .. id, size)
  redis.call('HINCRBY', sizes, 'total', size)
  keep_until(names, until_)
  keep_until(sizes, until_)
end
return deleted
