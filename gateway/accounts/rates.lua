--[[
Sliding-window counters with a resolution of one second. A request is counted against all of its
limits or against none.

Each key is a HASH of one limit: unix second -> amount counted in it, 'used' their sum, 'swept' the
second in which expired seconds were last dropped. A second counts until it is completely outside
the window, so that no interval as long as the window contains more than the limit. The only clock
is the server's. All keys belong to one account and therefore to one slot of a cluster.

  take <window> <limit> <amount> …  -> taken?, second, then of each key: used, reset, wait
  give <second> <amount> …          -> nothing: returns what was counted in a second

'reset' is the number of seconds until nothing is used, 'wait' the number of seconds until there is
room for the amount; each is 0 if that is the case already.
]]

local call = redis.call
local clock = call('TIME')
local now = tonumber(clock[1])

if ARGV[1] == 'give' then
  for i, key in ipairs(KEYS) do
    local counted = tonumber(call('HGET', key, ARGV[2]) or 0)
    local back = math.min(counted, tonumber(ARGV[2 + i]))
    if back > 0 then
      call('HINCRBY', key, ARGV[2], -back)
      call('HINCRBY', key, 'used', -back)
    end
  end
  return
end

local window = tonumber(ARGV[2])

local function seconds_of(key)
  local fields, found = call('HGETALL', key), {}
  for i = 1, #fields, 2 do
    local second = tonumber(fields[i])
    if second then found[#found + 1] = {second, tonumber(fields[i + 1])} end
  end
  table.sort(found, function(a, b) return a[1] < b[1] end)
  return found
end

-- Drop seconds that have left the window, once a second; return the amount used.
local function sweep(key)
  local seen = call('HMGET', key, 'used', 'swept')
  if not seen[1] then return 0 end
  local used = tonumber(seen[1])
  if tonumber(seen[2] or 0) == now then return used end
  for _, entry in ipairs(seconds_of(key)) do
    if entry[1] >= now - window then break end
    used = used - entry[2]
    call('HDEL', key, entry[1])
  end
  call('HSET', key, 'used', used, 'swept', now)
  return used
end

-- Number of seconds until a second has left the window.
local function leaves(second)
  return math.max(1, second + window + 1 - now)
end

local function reset_and_wait(key, missing)
  local reset, wait = 0, 0
  for _, entry in ipairs(seconds_of(key)) do
    if entry[2] > 0 then
      reset = leaves(entry[1])
      if missing > 0 then wait = reset end
      missing = missing - entry[2]
    end
  end
  return reset, wait
end

local used, missing, fits = {}, {}, true
for i, key in ipairs(KEYS) do
  used[i] = sweep(key)
  missing[i] = used[i] + tonumber(ARGV[2 + 2 * i]) - tonumber(ARGV[1 + 2 * i])
  if tonumber(ARGV[2 + 2 * i]) > 0 and missing[i] > 0 then fits = false end
end

local answer = {fits and 1 or 0, now}
for i, key in ipairs(KEYS) do
  local amount, reset, wait = tonumber(ARGV[2 + 2 * i]), nil, 0
  if fits and amount > 0 then
    call('HINCRBY', key, now, amount)
    call('HINCRBY', key, 'used', amount)
    call('HSETNX', key, 'swept', now)
    call('EXPIRE', key, window + 2)
    used[i], reset = used[i] + amount, leaves(now)
  else
    reset, wait = reset_and_wait(key, amount > 0 and missing[i] or 0)
  end
  answer[#answer + 1] = used[i]
  answer[#answer + 1] = reset
  answer[#answer + 1] = wait
end
return answer
