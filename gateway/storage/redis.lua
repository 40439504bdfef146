-- Reservations in Redis: one call of this script is one atomic operation. `ReservationStore` in `storage/base.py` is the
-- contract, `storage/leaky_bucket.py` explains the buckets, and `storage/evaluation.py` is `evaluate` in Python.
--
-- KEYS[1] is a tenant's prefix, wp:{tenant}. All keys below begin with the prefix, so they are in one hash slot:
--   :bucket:<key>       string  msgpack {level, time, troughs = {time, level, time, level...}}
--   :account:<key>      hash    spent, held, and for each reservation with a hold: hold:<id> = amount
--   :leases:<key>       zset    the reservations with a hold on that account, by the end of their lease
--   :reservation:<id>   string  msgpack {owner, expires_at, forget_at, taken = {charge...}}
--   :owner:<owner>      zset    the owner's reservations, by the time at which they are forgotten
--   :slices:<owner>     string  msgpack {process, number, receipt, expires_at, grant, charges = {charge...}}
--
-- The slices that a gateway has of a budget or of slots are two holds of the account: @<owner> is what its calls have
-- reserved, @<owner>/unused the rest. Its slice of a rate is a hold @<owner>/unused of an account with the rate's key.
--
-- ARGV: operation, reservation id or owner, the caller's time or "" for the server's, then the operation's arguments.
-- Operations have other names than in Python, to stay compatible: adopt is `force_reserve`, left is `remaining`, extend
-- is `extend_lease`, leave is `release_slots`, release_owner is `expire_leases`.
-- Amounts of money stay text. HINCRBY adds them exactly; comparing them as doubles is exact below 2**53.

local TOLERANCE_SECONDS = 1e-6
local MAX_TROUGHS = 32
local CLOCK_STEP_SECONDS = 5 -- the same value as in storage/base.py, as the five below
local LEASE_SECONDS_MAX = 3600
local REMEMBER_SECONDS = 3600
local SLICE_MEMORY_SECONDS = 62 * 86400
local SLICE_SHARE = 2
local HELD_RETRY_SECONDS = 1
local TEST_CLOCK_GRACE_SECONDS = 3600 -- a test's clock may be slower than the clock by which Redis expires keys

local prefix, operation, id = KEYS[1], ARGV[1], ARGV[2]
local now = tonumber(ARGV[3])
local grace = TEST_CLOCK_GRACE_SECONDS
if not now then
  local time = redis.call('TIME')
  now, grace = time[1] + time[2] / 1e6, 0
end

local function name(kind, key)
  return prefix .. ':' .. kind .. ':' .. key
end

local function milliseconds(seconds)
  return string.format('%.0f', math.ceil((seconds + grace) * 1000) + 1)
end

-- Keeps all of the keys for at least `seconds`, or for ever if `seconds` is negative. Never shortens a key's expiry.
-- Sets twice the time, so most calls do not have to set the expiry.
local function keep(seconds, ...)
  for _, key in ipairs({...}) do
    if seconds < 0 then
      redis.call('PERSIST', key)
    elseif redis.call('PTTL', key) < seconds * 1000 then
      for _, each in ipairs({...}) do
        redis.call('PEXPIRE', each, milliseconds(2 * seconds))
      end
      return
    end
  end
end

local function load(key)
  local packed = redis.call('GET', key)
  return packed and cmsgpack.unpack(packed)
end

local function save(key, value, seconds)
  redis.call('SET', key, cmsgpack.pack(value), 'PX', milliseconds(seconds))
end

-- Buckets -----------------------------------------------------------------------------------------------------------

local buckets = {} -- those that this call has read

local function bucket_of(charge)
  local bucket = buckets[charge.key]
  if bucket then
    return bucket
  end
  bucket = load(name('bucket', charge.key)) or {level = 0, time = 0, troughs = {}}
  buckets[charge.key] = bucket
  local leaked = math.max(0, now - bucket.time) * charge.limit / charge.period_seconds
  bucket.level = math.max(0, bucket.level - leaked)
  if now < bucket.time - CLOCK_STEP_SECONDS then
    bucket.time = now
    bucket.troughs = bucket.troughs[2] and {now, bucket.troughs[2]} or {}
  end
  bucket.time = math.max(bucket.time, now)
  return bucket
end

local function save_bucket(charge, bucket)
  save(name('bucket', charge.key), bucket, bucket.level * charge.period_seconds / charge.limit)
end

local function pour(charge, amount)
  local bucket = bucket_of(charge)
  local troughs = bucket.troughs
  while #troughs > 0 and troughs[#troughs] >= bucket.level do
    troughs[#troughs] = nil
    troughs[#troughs] = nil
  end
  troughs[#troughs + 1] = bucket.time
  troughs[#troughs + 1] = bucket.level
  if #troughs > 2 * MAX_TROUGHS then -- merge the two oldest into one: the later time, the lower level
    table.remove(troughs, 4)
    table.remove(troughs, 1)
    troughs[1], troughs[2] = troughs[2], troughs[1]
  end
  bucket.level = bucket.level + amount
  save_bucket(charge, bucket)
  return bucket.time
end

local function settle_bucket(charge, used)
  if used > charge.amount then
    pour(charge, used - charge.amount)
    return
  end
  local bucket = bucket_of(charge)
  local troughs = bucket.troughs
  local later, set_back = 1, charge.poured_at > bucket.time
  while not set_back and later < #troughs and troughs[later] <= charge.poured_at do
    later = later + 2
  end
  local refund = math.min(charge.amount - used, troughs[later + 1] or bucket.level, bucket.level)
  bucket.level = bucket.level - refund
  for i = later + 1, #troughs, 2 do
    troughs[i] = troughs[i] - refund
  end
  while later > 1 and later < #troughs and troughs[later - 1] >= troughs[later + 1] do
    later = later - 2
    table.remove(troughs, later)
    table.remove(troughs, later)
  end
  save_bucket(charge, bucket)
end

-- Accounts ----------------------------------------------------------------------------------------------------------

-- Frees the amount of an account that a reservation holds. Returns 1 if the reservation had a lease there, else 0.
local function return_hold(key, reservation)
  local account, field = name('account', key), 'hold:' .. reservation
  local amount = redis.call('HGET', account, field)
  if amount and amount ~= '0' then
    redis.call('HINCRBY', account, 'held', '-' .. amount)
  end
  if amount then
    redis.call('HDEL', account, field)
  end
  return redis.call('ZREM', name('leases', key), reservation)
end

-- Pours the slice of a rate into its bucket, at the end of its lease if that is over.
local function count_as_used(charge, hold)
  local amount = tonumber(redis.call('HGET', name('account', charge.key), 'hold:' .. hold) or 0)
  if amount == 0 then
    return
  end
  local real_now, expires_at = now, tonumber(redis.call('ZSCORE', name('leases', charge.key), hold) or now)
  local known = buckets[charge.key] or load(name('bucket', charge.key))
  if expires_at < now then
    now = math.max(expires_at, known and known.time or 0)
  end
  pour(charge, amount)
  now = real_now
  buckets[charge.key] = nil -- it leaks until now when it is read again
end

-- Frees the amounts of reservations whose lease has ended, or ends too late to have been set by this clock. If `rate` is
-- given, its slices count as used.
local function return_expired(key, rate)
  local leases, latest = name('leases', key), string.format('(%.17g', now + LEASE_SECONDS_MAX)
  for _, over in ipairs({{'-inf', string.format('%.17g', now)}, {latest, '+inf'}}) do
    for _, reservation in ipairs(redis.call('ZRANGEBYSCORE', leases, over[1], over[2])) do
      if rate then
        count_as_used(rate, reservation)
      end
      return_hold(key, reservation)
    end
  end
end

-- Returns what slices hold of an account beyond what calls have reserved.
local function unused_of(key)
  local unused = 0
  for _, reservation in ipairs(redis.call('ZRANGE', name('leases', key), 0, -1)) do
    if string.sub(reservation, -7) == '/unused' then
      unused = unused + tonumber(redis.call('HGET', name('account', key), 'hold:' .. reservation) or 0)
    end
  end
  return unused
end

-- Returns what slices hold of a rate.
local function held_of_rate(charge)
  local account = name('account', charge.key)
  if not redis.call('HGET', account, 'held') then
    return 0
  end
  return_expired(charge.key, charge)
  return tonumber(redis.call('HGET', account, 'held') or 0)
end

-- Lets both keys expire at the same instant, because an account without its leases would hold amounts for ever.
local function keep_account(charge)
  keep(charge.keep_seconds, name('account', charge.key), name('leases', charge.key))
end

-- Charges -----------------------------------------------------------------------------------------------------------

-- Returns the amount left after the charge. If it does not fit: nil, the amount left now, and seconds to retry or "".
-- If `slices_are_left` is true, the unused part of slices counts as left.
local function evaluate(charge, slices_are_left)
  if charge.kind == 'rate' then
    local held = held_of_rate(charge) -- may change the bucket
    local leak = charge.limit / charge.period_seconds
    local room = charge.limit - bucket_of(charge).level + TOLERANCE_SECONDS * (1 + leak)
    if slices_are_left then
      held = 0
    end
    if charge.amount <= room - held then
      return math.floor(room - held - charge.amount)
    end
    local seconds = (charge.amount - room) / leak
    if held > 0 then
      seconds = math.max(seconds, HELD_RETRY_SECONDS)
    end
    local retry = charge.amount <= charge.limit and string.format('%.17g', seconds) or ''
    return nil, math.max(0, math.floor(room - held)), retry
  end
  return_expired(charge.key)
  local account = redis.call('HMGET', name('account', charge.key), 'spent', 'held')
  local amount, limit = tonumber(charge.amount), tonumber(charge.limit)
  local spent, held = tonumber(account[1] or 0), tonumber(account[2] or 0)
  if slices_are_left then
    held = held - unused_of(charge.key)
  end
  local room = limit - spent - held
  if amount <= room then
    return room - amount
  end
  return nil, math.max(0, room), amount <= limit - spent and 'held' or ''
end

local function take(charge, expires_at)
  if charge.kind == 'rate' then
    charge.poured_at = pour(charge, charge.amount)
    return
  end
  local account = name('account', charge.key)
  redis.call('HINCRBY', account, 'held', charge.amount)
  redis.call('HSET', account, 'hold:' .. id, charge.amount)
  redis.call('ZADD', name('leases', charge.key), string.format('%.17g', expires_at), id)
  keep_account(charge)
end

-- Returns the charges from ARGV[6] on, five values each: kind, key, amount, limit, and the period of a rate or the
-- seconds for which an account is kept.
local function charges_of_argv()
  local charges = {}
  for i = 6, #ARGV, 5 do
    local charge = {kind = ARGV[i], key = ARGV[i + 1], amount = ARGV[i + 2], limit = ARGV[i + 3]}
    if charge.kind == 'rate' then
      charge.amount, charge.limit = tonumber(charge.amount), tonumber(charge.limit)
      charge.period_seconds = tonumber(ARGV[i + 4])
    else
      charge.keep_seconds = tonumber(ARGV[i + 4])
    end
    charges[#charges + 1] = charge
  end
  return charges
end

-- Operations --------------------------------------------------------------------------------------------------------

-- Stores a reservation with a lease of the given seconds from now, and lists it under its owner.
local function remember(reservation, lease_seconds)
  reservation.expires_at = now + lease_seconds
  reservation.forget_at = reservation.expires_at + REMEMBER_SECONDS
  save(name('reservation', id), reservation, reservation.forget_at - now)
  if reservation.owner == '' then
    return
  end
  local owned = name('owner', reservation.owner)
  redis.call('ZREMRANGEBYSCORE', owned, '-inf', string.format('%.17g', now))
  redis.call('ZADD', owned, string.format('%.17g', reservation.forget_at), id)
  keep(reservation.forget_at - now, owned)
end

-- Returns the stored reservation, whose lease may have ended, or nil or false if it does not exist.
local function recall(reservation_id)
  local reservation = load(name('reservation', reservation_id))
  return reservation and reservation.forget_at > now and reservation
end

local function hold(charges, lease_seconds, owner)
  for _, charge in ipairs(charges) do
    take(charge, now + lease_seconds)
  end
  remember({owner = owner, taken = charges}, lease_seconds)
end

-- Slices ------------------------------------------------------------------------------------------------------------

-- Ends the slice of one limit. The slice of a rate may count as used. Returns whether the slice still existed.
local function take_back(charge, owner, counts_as_used)
  local unused = '@' .. owner .. '/unused'
  if charge.kind ~= 'rate' then
    return return_hold(charge.key, '@' .. owner) + return_hold(charge.key, unused) > 0
  end
  if counts_as_used then
    count_as_used(charge, unused)
  end
  return return_hold(charge.key, unused) > 0
end

local function set_hold(key, hold, amount, growth, expires_at)
  local account, field = name('account', key), 'hold:' .. hold
  redis.call('HSET', account, field, amount)
  if amount ~= '0' then
    redis.call('HINCRBY', account, 'held', amount)
  end
  if growth ~= '0' then
    redis.call('HINCRBY', account, field, growth)
    redis.call('HINCRBY', account, 'held', growth)
  end
  redis.call('ZADD', name('leases', key), string.format('%.17g', expires_at), hold)
end

-- Charges what was used of one slice, and begins the slice anew. Returns whether it holds anything (a slice that holds
-- nothing is not there, so its lease cannot end), its growth, what is left, and `used_at`.
local function renew_slice(use, owner, lapsed, replicas, lease_seconds)
  local charge, used_at, room = use.charge, 0, 0
  if charge.kind == 'rate' then
    used_at = now
    for _, refund in ipairs(use.refunds) do
      local poured = {key = charge.key, limit = charge.limit, period_seconds = charge.period_seconds}
      poured.amount, poured.poured_at = refund.amount, refund.at
      settle_bucket(poured, 0)
    end
    if use.used ~= '0' and not lapsed then
      used_at = pour(charge, tonumber(use.used))
    end
    local held = held_of_rate(charge)
    local tolerance = TOLERANCE_SECONDS * (1 + charge.limit / charge.period_seconds)
    room = math.floor(charge.limit - bucket_of(charge).level + tolerance) - held
  else
    return_expired(charge.key)
    local account = name('account', charge.key)
    if charge.kind == 'spend' then
      redis.call('HINCRBY', account, 'spent', use.used)
    end
    local known = redis.call('HMGET', account, 'spent', 'held')
    room = tonumber(charge.limit) - tonumber(known[1] or 0) - tonumber(known[2] or 0)
  end
  local unused, free = tonumber(use.unused), room - tonumber(use.reserved)
  local share = math.max(tonumber(use.needed), math.floor(free / (SLICE_SHARE * replicas)) - unused)
  local growth = string.format('%.0f', math.max(0, math.min(tonumber(use.wanted), free - unused, share)))
  local holds = use.unused ~= '0' or use.reserved ~= '0' or growth ~= '0'
  local expires_at, unused_hold = now + lease_seconds, '@' .. owner .. '/unused'
  if holds then
    set_hold(charge.key, unused_hold, use.unused, growth, expires_at)
  end
  if holds and charge.kind == 'rate' then
    keep(lease_seconds + charge.period_seconds, name('account', charge.key), name('leases', charge.key))
  elseif holds then
    set_hold(charge.key, '@' .. owner, use.reserved, '0', expires_at)
  end
  if charge.kind ~= 'rate' then
    keep_account(charge)
  end
  return holds, growth, string.format('%.0f', math.max(0, free - unused - tonumber(growth))), string.format('%.17g', used_at)
end

-- Ends the slices of an owner. Returns 1 if it had any, else 0.
local function end_slices(owner)
  local record = load(name('slices', owner))
  if not record or record.expires_at <= now then
    return 0
  end
  for _, charge in ipairs(record.charges) do
    take_back(charge, owner, true)
  end
  record.expires_at = now
  save(name('slices', owner), record, SLICE_MEMORY_SECONDS)
  return 1
end

local operations = {}

-- report_slices: the id is an owner; lease seconds, process, number, receipt or "", replicas, then for each slice: kind,
-- key, limit, period or seconds to keep, unused, reserved, used, needed, wanted, number of refunds, and for each refund:
-- time, amount -> three values for each slice: growth, what is left, used_at
function operations.report()
  local lease_seconds, process, number, receipt = tonumber(ARGV[4]), ARGV[5], ARGV[6], ARGV[7]
  local replicas, last = tonumber(ARGV[8]), load(name('slices', id))
  if last and last.process == process and last.number == number then
    return last.grant
  end
  local uses, renewed, i = {}, {}, 9
  while i <= #ARGV do
    local charge = {kind = ARGV[i], key = ARGV[i + 1], limit = ARGV[i + 2]}
    if charge.kind == 'rate' then
      charge.limit, charge.period_seconds = tonumber(charge.limit), tonumber(ARGV[i + 3])
    else
      charge.keep_seconds = tonumber(ARGV[i + 3])
    end
    local use = {charge = charge, unused = ARGV[i + 4], reserved = ARGV[i + 5], used = ARGV[i + 6]}
    use.needed, use.wanted, use.refunds = ARGV[i + 7], ARGV[i + 8], {}
    for refund = 1, tonumber(ARGV[i + 9]) do
      local at = i + 8 + 2 * refund
      use.refunds[refund] = {at = tonumber(ARGV[at]), amount = tonumber(ARGV[at + 1])}
    end
    uses[#uses + 1] = use
    renewed[charge.key] = last and last.process == process
    i = i + 10 + 2 * #use.refunds
  end
  local lapsed, grant, charges = {}, {}, {}
  for _, charge in ipairs(last and last.charges or {}) do
    if not take_back(charge, id, not renewed[charge.key]) then
      lapsed[charge.key] = renewed[charge.key]
    end
  end
  for _, use in ipairs(uses) do
    local holds, growth, left, used_at = renew_slice(use, id, lapsed[use.charge.key], replicas, lease_seconds)
    grant[#grant + 1], grant[#grant + 2], grant[#grant + 3] = growth, left, used_at
    charges[#charges + 1] = holds and use.charge or nil
  end
  local record = {process = process, number = number, grant = grant, charges = charges, expires_at = now + lease_seconds}
  record.receipt = receipt ~= '' and receipt or last and last.receipt or ''
  save(name('slices', id), record, SLICE_MEMORY_SECONDS)
  return grant
end

-- settled_receipt: the id is an owner -> an event id, or nil
function operations.settled_receipt()
  local record = load(name('slices', id))
  return record and record.receipt
end

-- lease seconds, owner, charges -> {"granted", left...} | {"refused", index, left, seconds or "held" or ""} | {"open"}
function operations.reserve()
  local lease_seconds, owner, charges = tonumber(ARGV[4]), ARGV[5], charges_of_argv()
  if recall(id) then
    return {'open'}
  end
  local granted = {'granted'}
  for i, charge in ipairs(charges) do
    local left, remaining, retry = evaluate(charge)
    if not left then
      return {'refused', i - 1, remaining, retry}
    end
    granted[i + 1] = left
  end
  hold(charges, lease_seconds, owner)
  return granted
end

-- force_reserve: lease seconds, owner, charges -> 1 | 0
function operations.adopt()
  if recall(id) then
    return 0
  end
  hold(charges_of_argv(), tonumber(ARGV[4]), ARGV[5])
  return 1
end

-- remaining: the id is a tenant; "", "", charges -> what is left of each
function operations.left()
  local rooms = {}
  for i, charge in ipairs(charges_of_argv()) do
    local left, remaining = evaluate(charge, true)
    rooms[i] = left and left + tonumber(charge.amount) or remaining
  end
  return rooms
end

-- extend_lease: lease seconds -> 1 | 0
function operations.extend()
  local lease_seconds, reservation = tonumber(ARGV[4]), recall(id)
  if not reservation or reservation.expires_at <= now then
    return 0
  end
  remember(reservation, lease_seconds)
  for _, charge in ipairs(reservation.taken) do
    if charge.kind ~= 'rate' then
      redis.call('ZADD', name('leases', charge.key), 'XX', string.format('%.17g', reservation.expires_at), id)
      keep_account(charge)
    end
  end
  return 1
end

-- release_slots: nothing -> 1 | 0
function operations.leave()
  local reservation, freed = recall(id), 0
  for _, charge in ipairs(reservation and reservation.expires_at > now and reservation.taken or {}) do
    if charge.kind == 'lease' then
      freed = math.max(freed, return_hold(charge.key, id))
    end
  end
  return freed
end

-- actual amounts -> 1 | 0 | {"charges", the reservation's number of charges}
function operations.settle()
  local reservation = recall(id)
  if not reservation then
    return 0
  end
  if #reservation.taken ~= #ARGV - 3 then
    return {'charges', #reservation.taken}
  end
  redis.call('DEL', name('reservation', id))
  redis.call('ZREM', name('owner', reservation.owner), id)
  for i, charge in ipairs(reservation.taken) do
    local used = ARGV[3 + i]
    if charge.kind == 'rate' then
      settle_bucket(charge, tonumber(used))
    else
      return_hold(charge.key, id)
      if charge.kind == 'spend' then
        redis.call('HINCRBY', name('account', charge.key), 'spent', used)
        keep_account(charge)
      end
    end
  end
  return 1
end

-- expire_leases: the id is an owner -> how many leases ended
function operations.release_owner()
  local released = 0
  for _, reservation_id in ipairs(redis.call('ZRANGE', name('owner', id), 0, -1)) do
    local reservation = recall(reservation_id)
    if reservation and reservation.expires_at > now then
      for _, charge in ipairs(reservation.taken) do
        if charge.kind ~= 'rate' then
          return_hold(charge.key, reservation_id)
        end
      end
      reservation.expires_at = now
      save(name('reservation', reservation_id), reservation, reservation.forget_at - now)
      released = released + 1
    end
  end
  return released + end_slices(id)
end

-- the id is an owner, or ""; alive seconds -> how many owners have reported within them
function operations.count_replicas()
  local replicas, alive_seconds = name('alive', 'replicas'), tonumber(ARGV[4])
  if id ~= '' then
    redis.call('ZADD', replicas, string.format('%.17g', now), id)
  end
  redis.call('ZREMRANGEBYSCORE', replicas, '-inf', string.format('%.17g', now - alive_seconds))
  redis.call('ZREMRANGEBYSCORE', replicas, string.format('(%.17g', now + CLOCK_STEP_SECONDS), '+inf')
  redis.call('PEXPIRE', replicas, milliseconds(alive_seconds))
  return redis.call('ZCARD', replicas)
end

return operations[operation]()
