-- Documents in Redis: one call of this script is one atomic operation. `DocumentStore` in `storage/base.py` is the
-- contract.
--
-- KEYS[1] is a tenant's prefix, wp:{tenant}. All keys below begin with the prefix, so they are in one hash slot:
--   :document:<name>   hash   head and body
--   :documents         zset   the names, by the time of their expiry in milliseconds
--   :document_folders  zset   the names with a slash, in the order of their bytes (all scores are 0)
--   :document_bytes    hash   the bytes of each document, in =<name>, and of all together, in total
--
-- ARGV: operation, name, then the operation's arguments. Redis expires documents. The next put or delete removes the
-- names of expired documents from the lists.

local FORGOTTEN_AT_ONCE = 100
local LISTED_AT_ONCE = 100

local prefix, operation, id = KEYS[1], ARGV[1], ARGV[2]
local names, sizes, folders = prefix .. ':documents', prefix .. ':document_bytes', prefix .. ':document_folders'
local time = redis.call('TIME')
local now = math.floor(time[1] * 1000 + time[2] / 1000)

local function delete(name)
  local size = redis.call('HGET', sizes, '=' .. name)
  if size then
    redis.call('HDEL', sizes, '=' .. name)
    redis.call('HINCRBY', sizes, 'total', -size)
  end
  redis.call('ZREM', names, name)
  if string.find(name, '/', 1, true) then
    redis.call('ZREM', folders, name)
  end
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

-- The names of a folder's documents that exist, behind the name `after`. '0' follows '/' in the order of bytes.
local function list(folder, after, limit, order)
  local found, first, last = {}, '[' .. folder .. '/', '(' .. folder .. '0'
  while #found < limit do
    if after ~= '' and order == 'ascending' and after >= folder .. '/' then
      first = '(' .. after
    elseif after ~= '' and order == 'descending' and after < folder .. '0' then
      last = '(' .. after
    end
    local some
    if order == 'ascending' then
      some = redis.call('ZRANGEBYLEX', folders, first, last, 'LIMIT', 0, LISTED_AT_ONCE)
    else
      some = redis.call('ZREVRANGEBYLEX', folders, last, first, 'LIMIT', 0, LISTED_AT_ONCE)
    end
    for _, name in ipairs(some) do
      after = name
      if #found < limit and redis.call('EXISTS', prefix .. ':document:' .. name) == 1 then
        found[#found + 1] = name
      end
    end
    if #some < LISTED_AT_ONCE then
      break
    end
  end
  return found
end

-- Lets a document expire later, unless it has expired.
local function keep_document(name, until_)
  local key = prefix .. ':document:' .. name
  local before = redis.call('PEXPIRETIME', key)
  if before > 0 and before < until_ then
    redis.call('PEXPIREAT', key, until_)
    redis.call('ZADD', names, until_, name)
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
if operation == 'list' then
  return list(id, ARGV[3], tonumber(ARGV[4]), ARGV[5])
end
if operation == 'keep' then
  local until_ = now + tonumber(ARGV[3])
  keep_document(id, until_)
  for _, name in ipairs(redis.call('ZRANGEBYLEX', folders, '[' .. id .. '/', '(' .. id .. '0')) do
    keep_document(name, until_)
  end
  for _, key in ipairs({names, sizes, folders}) do
    if redis.call('EXISTS', key) == 1 then
      keep_until(key, until_)
    end
  end
  return 0
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
  if string.find(id, '/', 1, true) then
    redis.call('ZADD', folders, 0, id)
    keep_until(folders, until_)
  end
end
return deleted
