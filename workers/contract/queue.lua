--[[
The atomic operations on one model's queue. KEYS[1] is the model's prefix '<namespace>:{<model>}',
whose braces keep all keys of a model in one cluster slot; ARGV[1] is the name of the operation. Uses
commands of Redis 6.2 only, and only the server's clock. Every key has a time to live.

  job:<id>         HASH    one job; after its end only its final state, for late calls
  queue:<account>  ZSET    queued ids of an account by arrival
  accounts         ZSET    accounts with queued jobs, by virtual start tag
  backlog          HASH    account -> estimated cost (us) of its queued jobs
  finish           ZSET    virtual finish tag of each account
  running          HASH    account -> number of running jobs
  leases           ZSET    running ids by expiry of the lease (ms)
  worker:<name>    SET     ids leased by a worker
  answer:<name>    STRING  nonce and ids of a worker's last lease
  delayed          ZSET    ids that wait for a retry, by due time (ms)
  deadlines        ZSET    ids by deadline (ms)
  live             ZSET    ids that have not ended, by arrival (ms); its size is the demand
  wake             ZSET    one marker, present if a worker should try to lease
  counters         HASH    queued, cost_us, sequence, virtual, pace, service_us
  done             STREAM  how jobs ended, and notes for the next holders (status 'note')

An account is in 'accounts' and 'backlog' exactly while it has queued jobs.
A job is in exactly one of its account's queue, 'leases' and 'delayed', or it has ended.

Fairness is start-time fair queueing: accounts are served in the order of their start tags. Serving a
job advances the tag by cost / weight, and an account that becomes active starts at the tag served
last, so that idle accounts do not accumulate credit. Costs are whole microseconds, because sums of
fractions drift.

An account that runs its share of the model's jobs is skipped while another one waits, so that wrong
estimates or long jobs do not give one account all slots of a model. Slots that are still free are
then assigned in the order of the tags: no slot stays free while jobs are queued.
]]

local LIVE_S = 7 * 24 * 3600
local ENDED_S = 3600
local ANSWER_S = 120
local SCAN = 64
local SMOOTHING = 0.1
local BACKLOGS = 4096
-- Offset of arrival numbers. Jobs queued by older versions have it, so the order is kept.
local FIRST = 1e13

local call = redis.call
local prefix = KEYS[1]
local JOB, QUEUE = prefix .. ':job:', prefix .. ':queue:'
local WORKER, ANSWER = prefix .. ':worker:', prefix .. ':answer:'
local ACCOUNTS, BACKLOG, FINISH = prefix .. ':accounts', prefix .. ':backlog', prefix .. ':finish'
local RUNNING, LEASES, DELAYED = prefix .. ':running', prefix .. ':leases', prefix .. ':delayed'
local DEADLINES, LIVE, WAKE = prefix .. ':deadlines', prefix .. ':live', prefix .. ':wake'
local COUNTERS, DONE = prefix .. ':counters', prefix .. ':done'

local clock = call('TIME')
local now_us = clock[1] * 1000000 + clock[2]
local now = math.floor(now_us / 1000)

-- Changes of a script are collected here and written once, by commit().
local queued, cost_us, sequence, virtual, pace, service_us
local depths, finishes, starts, backlogs, emptied = {}, {}, {}, {}, {}
local leased, expired, ended, touched = {}, {}, {}, {}
local pushed, freed = {}, {}
local wake, counted = false, false

local function begin()
  local c = call('HMGET', COUNTERS, 'queued', 'cost_us', 'sequence', 'virtual', 'pace', 'service_us')
  queued, cost_us, sequence = tonumber(c[1] or 0), tonumber(c[2] or 0), tonumber(c[3] or 0)
  virtual, pace, service_us = tonumber(c[4] or 0), tonumber(c[5] or 0), tonumber(c[6] or 0)
end

local function write_pushed(account)   -- add the jobs that were pushed to an account's queue
  call('ZADD', QUEUE .. account, unpack(pushed[account]))
  pushed[account] = nil
end

local function add(lists, name, value)
  local list = lists[name]
  if not list then
    list = {}
    lists[name] = list
  end
  list[#list + 1] = value
end

local function commit()
  for account in pairs(pushed) do write_pushed(account) end
  for worker, ids in pairs(freed) do call('SREM', WORKER .. worker, unpack(ids)) end
  if counted then
    if queued <= 0 then queued, cost_us = 0, 0 end
    call('HSET', COUNTERS, 'queued', queued, 'cost_us', cost_us, 'sequence', sequence,
      'virtual', virtual, 'pace', pace, 'service_us', service_us)
    touched[COUNTERS] = true
  end
  if #expired > 0 then call('ZREM', LEASES, unpack(expired)) end
  if #leased > 0 then
    call('ZADD', LEASES, unpack(leased))
    touched[LEASES] = true
  end
  if #ended > 0 then
    call('ZREM', LIVE, unpack(ended))
    call('ZREM', DEADLINES, unpack(ended))
  end
  for account, tag in pairs(finishes) do
    call('ZADD', FINISH, tag, account)
    touched[FINISH] = true
  end
  for account, cost in pairs(backlogs) do
    -- Jobs enqueued by an older version were not counted; never let a backlog become negative.
    if emptied[account] or call('HINCRBY', BACKLOG, account, cost) <= 0 then
      call('HDEL', BACKLOG, account)
    end
    touched[BACKLOG] = true
  end
  for account, count in pairs(starts) do
    if call('HINCRBY', RUNNING, account, count) <= 0 then call('HDEL', RUNNING, account) end
    touched[RUNNING] = true
  end
  if wake and queued > 0 and call('EXISTS', ACCOUNTS) == 1 then
    call('ZADD', WAKE, 0, '1')
    touched[WAKE] = true
  end
  for name in pairs(touched) do call('EXPIRE', name, LIVE_S) end
end

local function read(id)
  local f = call('HMGET', JOB .. id, 'state', 'account', 'score', 'cost_us', 'deadline_ms', 'attempt',
    'crashes', 'retries', 'token', 'worker', 'cancel', 'enqueued_us', 'started_us', 'reply', 'moved')
  if not f[1] or f[1] == 'barred' then return nil end
  return {
    state = f[1], account = f[2], score = f[3], cost_us = tonumber(f[4]), deadline = tonumber(f[5]),
    attempt = f[6], crashes = tonumber(f[7]), retries = tonumber(f[8]), token = f[9] or '',
    worker = f[10] or '', cancel = f[11], enqueued_us = f[12], started_us = f[13] or '0',
    reply = f[14], moved = f[15],
  }
end

local function depth(account)
  local n = depths[account]
  if not n then
    n = call('ZCARD', QUEUE .. account)
    depths[account] = n
  end
  return n
end

local function enter(account)          -- make an account with queued jobs eligible
  local tag = finishes[account] or tonumber(call('ZSCORE', FINISH, account) or 0)
  call('ZADD', ACCOUNTS, math.max(virtual, tag), account)
  touched[ACCOUNTS] = true
  wake = true
end

local function leave(account)          -- remove an account whose queue is empty
  call('ZREM', ACCOUNTS, account)
  emptied[account] = true
end

local function add_queued(account, count, cost) -- change the amount of queued work
  backlogs[account] = (backlogs[account] or 0) + cost
  queued, cost_us, counted = queued + count, cost_us + cost, true
end

local function push(id, account, score, cost)
  local n = depth(account)
  add(pushed, account, score)
  add(pushed, account, id)
  depths[account] = n + 1
  touched[QUEUE .. account] = true
  emptied[account] = nil
  add_queued(account, 1, cost)
  if n == 0 then enter(account) end
  wake = true
end

local function pull(id, account, cost) -- take a job out of its account's queue
  local n = depth(account)
  if pushed[account] then write_pushed(account) end
  if call('ZREM', QUEUE .. account, id) == 0 then return end
  depths[account] = n - 1
  add_queued(account, -1, -cost)
  if n == 1 then leave(account) end
end

local function settle(id, job, status, outcome, reason)
  -- Without its payload an ended job takes some hundred bytes; with it, jobs would fill the server.
  call('DEL', JOB .. id)
  call('HSET', JOB .. id, 'state', status, 'account', job.account, 'attempt', job.attempt,
    'token', job.token, 'worker', job.worker, 'enqueued_us', job.enqueued_us,
    'started_us', job.started_us, 'ended_us', now_us)
  call('EXPIRE', JOB .. id, ENDED_S)
  ended[#ended + 1] = id
  call('XADD', DONE, '*', 'id', id, 'attempt', job.attempt, 'status', status,
    'account', job.account, 'reply', job.reply or '', 'outcome', outcome, 'reason', reason or '')
  touched[DONE] = true
end

local function stop(id, job)           -- settle a job that was cancelled or is past its deadline
  settle(id, job, job.cancel == 'deadline' and 'expired' or 'cancelled', '', job.cancel)
end

local function notify(worker)            -- request a heartbeat now; may be lost
  call('PUBLISH', string.match(prefix, '^(.-):{') .. ':control:' .. worker, '1')
end

local function release(id, job)        -- end a lease
  expired[#expired + 1] = id
  add(freed, job.worker, id)
  starts[job.account] = (starts[job.account] or 0) - 1
end

local function requeue(id, job)        -- return a job to its place in the queue
  call('HSET', JOB .. id, 'state', 'queued', 'crashes', job.crashes, 'token', job.token)
  push(id, job.account, job.score, job.cost_us)
end

local function reclaim_job(id, job, crashed, crashes_max, reason)
  release(id, job)
  if crashed then job.crashes = job.crashes + 1 end
  if job.cancel then
    stop(id, job)
  elseif job.crashes >= crashes_max then
    settle(id, job, 'dead', '', reason)
  else
    job.token = ''                     -- fences a worker that still runs it
    requeue(id, job)
  end
end

local operations = {}

-- queue_max, account_max, then for each entry: id, account, weight, cost_us, deadline_ms, batch_key,
-- reply, payload -> for each entry {status, depth, cost_us}
function operations.enqueue()
  local queue_max, account_max = tonumber(ARGV[2]), tonumber(ARGV[3])
  local answers, arrivals, deadlines = {}, {}, {}
  begin()
  for i = 4, #ARGV, 8 do
    local id, account, cost, deadline = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 3]), ARGV[i + 4]
    local status = 'ok'
    if call('EXISTS', JOB .. id) == 1 then status = 'duplicate'
    elseif queued >= queue_max then status = 'queue_full'
    elseif depth(account) >= account_max then status = 'account_full'
    else
      sequence = sequence + 1
      local score = string.format('%.0f', FIRST + sequence)
      call('HSET', JOB .. id, 'state', 'queued', 'account', account, 'weight', ARGV[i + 2],
        'score', score, 'cost_us', cost, 'deadline_ms', deadline, 'batch_key', ARGV[i + 5],
        'reply', ARGV[i + 6], 'payload', ARGV[i + 7], 'attempt', 0, 'crashes', 0, 'retries', 0,
        'enqueued_us', now_us)
      call('EXPIRE', JOB .. id, LIVE_S)
      push(id, account, score, cost)
      arrivals[#arrivals + 1] = now
      arrivals[#arrivals + 1] = id
      if deadline ~= '0' then
        deadlines[#deadlines + 1] = deadline
        deadlines[#deadlines + 1] = id
      end
    end
    answers[#answers + 1] = {status, queued, cost_us}
  end
  if #arrivals > 0 then
    call('ZADD', LIVE, unpack(arrivals))
    touched[LIVE] = true
    if #deadlines > 0 then
      call('ZADD', DEADLINES, unpack(deadlines))
      touched[DEADLINES] = true
    end
    commit()
  end
  return answers
end

-- The functions below are created only for the operations that need them: all of them take 15 us.
if operations[ARGV[1]] then return operations[ARGV[1]]() end

local function waited(enqueued_us, started_us)  -- never negative, even if the clock was set back
  return math.max(started_us - tonumber(enqueued_us), 0)
end

local function describe(id)
  local f = call('HMGET', JOB .. id, 'token', 'attempt', 'account', 'reply', 'payload',
    'enqueued_us', 'started_us', 'note')
  return {id, f[1], tonumber(f[2]), f[3], f[4], f[5], waited(f[6], tonumber(f[7])), f[8] or ''}
end

local function lease_again(worker, nonce, lease_ms)
  -- A repeated call, because the worker lost the answer: return the same jobs.
  local answer = call('GET', ANSWER .. worker)
  if not answer or string.sub(answer, 1, #nonce + 1) ~= nonce .. ' ' then return nil end
  local taken = {}
  for id in string.gmatch(string.sub(answer, #nonce + 2), '%S+') do
    local f = call('HMGET', JOB .. id, 'state', 'token')
    if f[1] == 'running' and string.sub(f[2], 1, #nonce + 1) == nonce .. ':' then
      call('ZADD', LEASES, 'XX', now + lease_ms, id)
      taken[#taken + 1] = describe(id)
    end
  end
  return taken
end

-- The queues of accounts as a lease call sees them: ids that it has not taken, those that it has, and
-- how many it has read. They are read in pieces that grow, and what was taken is removed at the end.
local queues, keys = {}, {}

local function id_at(account, i)
  local q = queues[account]
  if not q then
    q = {ids = {}, taken = {}, read = 0, piece = 2}
    queues[account] = q
  end
  while not q.ids[i] and not q.complete do
    local found = call('ZRANGE', QUEUE .. account, q.read, q.read + q.piece - 1)
    for _, id in ipairs(found) do q.ids[#q.ids + 1] = id end
    q.complete = #found < q.piece
    q.read, q.piece = q.read + #found, math.min(q.piece * 2, SCAN)
  end
  return q.ids[i]
end

local function take(account, i, cost)  -- return whether the account has more jobs
  local q = queues[account]
  q.taken[#q.taken + 1] = table.remove(q.ids, i)
  add_queued(account, -1, -cost)
  return id_at(account, 1) ~= nil
end

local function remove_taken()
  for account, q in pairs(queues) do
    if #q.taken > 0 then
      call('ZREM', QUEUE .. account, unpack(q.taken))
      depths[account] = nil
    end
  end
end

local function describe_queued(id)
  local f = call('HMGET', JOB .. id, 'batch_key', 'cost_us', 'weight', 'deadline_ms', 'attempt',
    'reply', 'payload', 'enqueued_us', 'note')
  keys[id] = f[1]
  return f
end

-- Find an account's first job that fits the batch: its place and, if its hash exists, its fields.
local function candidate(account, batch_key, look)
  for i = 1, batch_key and math.max(look, 1) or 1 do
    local id = id_at(account, i)
    if not id then break end
    local f
    if not batch_key or (i == 1 and keys[id] == nil) then
      f = describe_queued(id)          -- usually it fits
    elseif keys[id] == nil then
      keys[id] = call('HGET', JOB .. id, 'batch_key')
    end
    local key = keys[id]
    if not key or not batch_key or key == batch_key then return i, f or describe_queued(id) end
  end
  return nil
end

-- worker, count, lease_ms, account_share, look_ahead, nonce
-- -> for each job {id, token, attempt, account, reply, payload, queued_us, note}
function operations.lease()
  local worker, count, lease_ms = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
  local look, nonce = tonumber(ARGV[6]), ARGV[7]
  local taken = lease_again(worker, nonce, lease_ms)
  if taken then return taken end
  begin()
  local ids, running, batch_key, skipped, rounds = {}, {}, nil, 0, 0
  -- The account with queued jobs, if it is the only one; its tag is written at the end.
  local sole, sole_tag
  -- The known slots: running jobs plus requested jobs.
  local slots = call('ZCARD', LEASES) + count
  local share_max, passed = math.max(math.floor(tonumber(ARGV[5]) * slots), 1), 0
  local sharing, rest = true, false
  taken = {}
  while #taken < count and rounds < count + SCAN do
    rounds = rounds + 1
    local account, tag
    if sole then
      if skipped == 0 and not emptied[sole] then account, tag = sole, sole_tag end
    else
      local heads = call('ZRANGE', ACCOUNTS, skipped, skipped == 0 and 1 or skipped, 'WITHSCORES')
      account, tag = heads[1], tonumber(heads[2])
      if account and skipped == 0 and not heads[3] then sole, sole_tag = account, tag end
    end
    if not account then
      if not (sharing and rest) then break end
      -- No other account waits: assign the rest in the order of the tags, ignoring the share.
      sharing, skipped, rounds = false, 0, 0
    else
      local runs = running[account] or tonumber(call('HGET', RUNNING, account) or 0)
      running[account] = runs
      local place, f = candidate(account, batch_key, look)
      if not place then
        skipped = skipped + 1
      elseif not f[1] then             -- the job's hash is gone: remove its queue entry
        ended[#ended + 1] = id_at(account, place)
        if not take(account, place, 0) then leave(account) end
      else
        local id, cost, weight = id_at(account, place), tonumber(f[2]), tonumber(f[3])
        local deadline = tonumber(f[4])
        if deadline ~= 0 and deadline <= now then
          if not take(account, place, cost) then leave(account) end
          settle(id, read(id), 'expired', '', 'deadline')
        elseif sharing and (runs >= share_max or weight < passed) then
          -- A flow of lower weight must not overtake one that has reached its share.
          if runs >= share_max then passed = math.max(passed, weight) end
          skipped, rest = skipped + 1, true
        else
          local attempt, token = tonumber(f[5]) + 1, nonce .. ':' .. (#taken + 1)
          local tag_next = tag + cost / weight
          batch_key = f[1]
          virtual = math.max(virtual, tag)
          finishes[account] = tag_next
          if not take(account, place, cost) then leave(account)
          elseif sole then sole_tag = tag_next
          else call('ZADD', ACCOUNTS, tag_next, account) end
          running[account] = runs + 1
          starts[account] = (starts[account] or 0) + 1
          call('HSET', JOB .. id, 'state', 'running', 'attempt', attempt, 'token', token,
            'worker', worker, 'started_us', now_us, 'moved', '')
          leased[#leased + 1] = now + lease_ms
          leased[#leased + 1] = id
          ids[#ids + 1] = id
          taken[#taken + 1] = {id, token, attempt, account, f[6], f[7], waited(f[8], now_us),
            f[9] or ''}
        end
      end
    end
  end
  remove_taken()
  if #ids > 0 then
    if sole and not emptied[sole] then call('ZADD', ACCOUNTS, sole_tag, sole) end
    call('SADD', WORKER .. worker, unpack(ids))
    touched[WORKER .. worker] = true
    call('SET', ANSWER .. worker, nonce .. ' ' .. table.concat(ids, ' '), 'EX', ANSWER_S)
  end
  wake = true                          -- if work is left, wake the next worker
  commit()
  return taken
end

if operations[ARGV[1]] then return operations[ARGV[1]]() end

-- lease_ms, then for each job: id, token -> {ids lost, {id, reason}*, {id, mailbox}*}
function operations.heartbeat()
  local until_ms, lost, cancelled, replies, kept = now + tonumber(ARGV[2]), {}, {}, {}, {}
  for i = 3, #ARGV, 2 do
    local id = ARGV[i]
    local f = call('HMGET', JOB .. id, 'state', 'token', 'cancel', 'moved', 'reply')
    if f[1] == 'running' and f[2] == ARGV[i + 1] then
      kept[#kept + 1] = until_ms
      kept[#kept + 1] = id
      if f[3] then
        cancelled[#cancelled + 1] = id
        cancelled[#cancelled + 1] = f[3]
      end
      if f[4] == '1' then
        replies[#replies + 1] = id
        replies[#replies + 1] = f[5]
      end
    elseif f[1] then                   -- a job unknown to the server is not lost: see complete
      lost[#lost + 1] = id
    end
  end
  if #kept > 0 then call('ZADD', LEASES, 'XX', unpack(kept)) end
  return {lost, cancelled, replies}
end

local function complete(retries_max, id, token, status, outcome, retry_ms)
  local job = read(id)
  if not job then
    if status == 'ok' or status == 'cancelled' then
      -- The server lost the job. Finished work is kept, and the remaining hash prevents that the
      -- job is enqueued again.
      job = {account = '', attempt = 0, token = token, worker = '', enqueued_us = 0, started_us = 0}
      settle(id, job, status, outcome, '')
    end
    return 'unknown'
  end
  if job.token ~= token then return 'fenced' end
  if job.state ~= 'running' then return 'already' end
  release(id, job)
  if status ~= 'retry' then
    settle(id, job, status, outcome, job.cancel)
    if status == 'ok' then
      local took_us = math.max(now_us - tonumber(job.started_us), 1)
      local ratio = took_us / job.cost_us
      pace = pace == 0 and ratio or pace + SMOOTHING * (ratio - pace)
      service_us = service_us == 0 and took_us or service_us + SMOOTHING * (took_us - service_us)
      counted = true
    end
    return 'done'
  end
  if job.cancel then
    stop(id, job)
    return 'done'
  end
  if job.retries >= retries_max or (job.deadline ~= 0 and now + retry_ms >= job.deadline) then
    settle(id, job, 'failed', outcome, 'retries')
    return 'done'
  end
  call('HSET', JOB .. id, 'retries', job.retries + 1)
  if retry_ms == 0 then
    requeue(id, job)
  else
    call('HSET', JOB .. id, 'state', 'delayed')
    call('ZADD', DELAYED, now + retry_ms, id)
    touched[DELAYED] = true
  end
  return 'retrying'
end

-- retries_max, then for each job: id, token, status, outcome, retry_ms -> an answer for each
function operations.complete()
  local retries_max, answers = tonumber(ARGV[2]), {}
  begin()
  for i = 3, #ARGV, 5 do
    answers[#answers + 1] = complete(retries_max, ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3],
      tonumber(ARGV[i + 4]))
  end
  commit()
  return answers
end

if operations[ARGV[1]] then return operations[ARGV[1]]() end

-- id, token, note -> kept, fenced or unknown
function operations.keep_note()
  local id, note = ARGV[2], ARGV[4]
  local f = call('HMGET', JOB .. id, 'state', 'token', 'account', 'attempt')
  if f[1] and (f[1] ~= 'running' or f[2] ~= ARGV[3]) then return 'fenced' end
  if f[1] then call('HSET', JOB .. id, 'note', note) end
  -- Sent to the gateways too, which enqueue the job again if this server is wiped.
  call('XADD', DONE, '*', 'id', id, 'attempt', f[4] or 0, 'status', 'note', 'account', f[3] or '',
    'reply', '', 'outcome', note, 'reason', '')
  call('EXPIRE', DONE, LIVE_S)
  return f[1] and 'kept' or 'unknown'
end

-- worker, crashed, crashes_max, limit -> number of reclaimed jobs, at most the limit
function operations.release_worker()
  local worker, crashed, crashes_max = ARGV[2], ARGV[3] == '1', tonumber(ARGV[4])
  local limit, count = tonumber(ARGV[5]), 0
  begin()
  for _, id in ipairs(call('SMEMBERS', WORKER .. worker)) do
    if count == limit then break end
    local job = read(id)
    call('SREM', WORKER .. worker, id)
    if job and job.state == 'running' and job.worker == worker then
      reclaim_job(id, job, crashed, crashes_max, 'worker lost')
      count = count + 1
    end
  end
  call('DEL', ANSWER .. worker)
  commit()
  return count
end

-- id, reason -> cancelled, cancelling, ended or unknown
function operations.cancel()
  local id = ARGV[2]
  local job = read(id)
  if not job then
    -- Its hold is being released: bar the job, in case a sweeper or a gateway enqueues it later.
    call('HSET', JOB .. id, 'state', 'barred')
    call('EXPIRE', JOB .. id, ENDED_S)
    return 'unknown'
  end
  if job.state == 'running' then
    call('HSETNX', JOB .. id, 'cancel', ARGV[3])
    notify(job.worker)
    return 'cancelling'
  end
  if job.state ~= 'queued' and job.state ~= 'delayed' then return 'ended' end
  begin()
  if job.state == 'queued' then pull(id, job.account, job.cost_us)
  else call('ZREM', DELAYED, id) end
  job.cancel = ARGV[3]
  stop(id, job)
  commit()
  return 'cancelled'
end

-- limit, crashes_max -> {expired leases, due retries, missed deadlines}
function operations.reclaim()
  local limit, crashes_max, counts = tonumber(ARGV[2]), tonumber(ARGV[3]), {0, 0, 0}
  begin()
  for _, id in ipairs(call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, limit)) do
    local job = read(id)
    if job and job.state == 'running' then
      reclaim_job(id, job, true, crashes_max, 'lease lapsed')
      counts[1] = counts[1] + 1
    else
      expired[#expired + 1] = id
      if not job then ended[#ended + 1] = id end
    end
  end
  for _, id in ipairs(call('ZRANGEBYSCORE', DELAYED, '-inf', now, 'LIMIT', 0, limit)) do
    local job = read(id)
    call('ZREM', DELAYED, id)
    if job and job.state == 'delayed' then
      requeue(id, job)
      counts[2] = counts[2] + 1
    elseif not job then
      ended[#ended + 1] = id
    end
  end
  for _, id in ipairs(call('ZRANGEBYSCORE', DEADLINES, '-inf', now, 'LIMIT', 0, limit)) do
    local job = read(id)
    call('ZREM', DEADLINES, id)
    if job then
      counts[3] = counts[3] + 1
      if job.state == 'running' then
        call('HSETNX', JOB .. id, 'cancel', 'deadline')
        notify(job.worker)
      elseif job.state == 'queued' or job.state == 'delayed' then
        if job.state == 'queued' then pull(id, job.account, job.cost_us)
        else call('ZREM', DELAYED, id) end
        settle(id, job, 'expired', '', 'deadline')
      end
    end
  end
  call('ZREMRANGEBYSCORE', FINISH, '-inf', string.format('%.17g', virtual))
  call('ZREMRANGEBYSCORE', LIVE, '-inf', now - LIVE_S * 1000)
  if call('EXISTS', LEASES) == 0 and #leased == 0 then
    -- Nothing runs. Reset the counts, in case a running job was forgotten.
    call('DEL', RUNNING)
  end
  wake = true                          -- a worker may have crashed between marker and lease
  commit()
  return counts
end

-- idle_ms -> number of settlers removed from the group: idle for longer, without pending outcomes
function operations.remove_settlers()
  local idle_ms, count = tonumber(ARGV[2]), 0
  local found = redis.pcall('XINFO', 'CONSUMERS', DONE, 'ledger')
  if found.err then return 0 end       -- no group exists yet
  for _, pairs_of in ipairs(found) do
    local about = {}
    for i = 1, #pairs_of, 2 do about[pairs_of[i]] = pairs_of[i + 1] end
    if about.pending == 0 and about.idle >= idle_ms then
      call('XGROUP', 'DELCONSUMER', DONE, 'ledger', about.name)
      count = count + 1
    end
  end
  return count
end

-- id, mailbox -> 1, or 0 if the job has ended
function operations.set_reply()
  local id = ARGV[2]
  local f = call('HMGET', JOB .. id, 'state', 'worker')
  if f[1] ~= 'queued' and f[1] ~= 'delayed' and f[1] ~= 'running' then return 0 end
  call('HSET', JOB .. id, 'reply', ARGV[3], 'moved', '1')
  if f[1] == 'running' then notify(f[2]) end
  return 1
end

-- id -> {state, attempt, position, enqueued_ms, started_ms, ended_ms, worker, cancel} or nothing
function operations.state()
  local id = ARGV[2]
  local f = call('HMGET', JOB .. id, 'state', 'attempt', 'account', 'enqueued_us', 'started_us',
    'ended_us', 'worker', 'cancel')
  if not f[1] or f[1] == 'barred' then return false end
  local position = 0
  if f[1] == 'queued' then
    -- Accounts take turns, so each account has about as many jobs ahead of this one.
    local rank = call('ZRANK', QUEUE .. f[3], id) or 0
    local total = tonumber(call('HGET', COUNTERS, 'queued') or 1)
    position = math.min((rank + 1) * math.max(call('ZCARD', ACCOUNTS), 1), total)
  end
  return {f[1], tonumber(f[2]), position, math.floor(tonumber(f[4]) / 1000),
    math.floor(tonumber(f[5] or 0) / 1000), math.floor(tonumber(f[6] or 0) / 1000), f[7] or '',
    f[8] or ''}
end

-- -> {queued, cost_us, running, delayed, live, oldest_ms, pace, service_us, accounts,
--     {account, cost_us}*}; the last is empty beyond BACKLOGS accounts, to keep the call short
function operations.load()
  begin()
  local oldest = call('ZRANGE', LIVE, 0, 0, 'WITHSCORES')
  local accounts = call('HLEN', BACKLOG)
  return {queued, cost_us, call('ZCARD', LEASES), call('ZCARD', DELAYED), call('ZCARD', LIVE),
    oldest[2] and math.max(now - tonumber(oldest[2]), 0) or 0, string.format('%.17g', pace),
    math.floor(service_us), accounts, accounts <= BACKLOGS and call('HGETALL', BACKLOG) or {}}
end

-- limit -> {account, queued, cost_us, running}* of the accounts that are served next, then of others
-- with running jobs; at most limit of each
function operations.accounts()
  local limit, found, seen = tonumber(ARGV[2]), {}, {}
  for _, account in ipairs(call('ZRANGE', ACCOUNTS, 0, limit - 1)) do
    found[#found + 1] = {account, call('ZCARD', QUEUE .. account),
      tonumber(call('HGET', BACKLOG, account) or 0),
      tonumber(call('HGET', RUNNING, account) or 0)}
    seen[account] = true
  end
  if call('HLEN', RUNNING) <= BACKLOGS then
    local running, others = call('HGETALL', RUNNING), 0
    for i = 1, #running, 2 do
      if not seen[running[i]] and others < limit then
        others = others + 1
        found[#found + 1] = {running[i], call('ZCARD', QUEUE .. running[i]),
          tonumber(call('HGET', BACKLOG, running[i]) or 0), tonumber(running[i + 1])}
      end
    end
  end
  return found
end

-- limit -> {id, account, attempt, enqueued_ms, deadline_ms, cost_us}* of the jobs that are leased
-- next, in this order if one is leased at a time; of the first SCAN accounts
function operations.jobs()
  local limit, heads, found = tonumber(ARGV[2]), {}, {}
  local first = call('ZRANGE', ACCOUNTS, 0, SCAN - 1, 'WITHSCORES')
  for i = 1, #first, 2 do
    heads[#heads + 1] = {account = first[i], tag = tonumber(first[i + 1]), at = 1}
  end
  while #found < limit do
    local head
    for _, each in ipairs(heads) do
      if not each.ended and (not head or each.tag < head.tag) then head = each end
    end
    if not head then break end
    head.ids = head.ids or call('ZRANGE', QUEUE .. head.account, 0, limit - 1)
    local id = head.ids[head.at]
    if not id then
      head.ended = true
    else
      local f = call('HMGET', JOB .. id, 'attempt', 'enqueued_us', 'deadline_ms', 'cost_us', 'weight')
      head.at = head.at + 1
      if f[1] then                     -- otherwise the job's hash is gone
        found[#found + 1] = {id, head.account, tonumber(f[1]), math.floor(tonumber(f[2]) / 1000),
          tonumber(f[3]), tonumber(f[4])}
        head.tag = head.tag + tonumber(f[4]) / tonumber(f[5])
      end
    end
  end
  return found
end

local function at_work(id, until_ms)   -- a leased or delayed job, and when that ends
  local f = call('HMGET', JOB .. id, 'account', 'attempt', 'enqueued_us', 'started_us',
    'deadline_ms', 'worker', 'cancel')
  if not f[1] then return nil end
  return {id, f[1], tonumber(f[2]), math.floor(tonumber(f[3]) / 1000),
    math.floor(tonumber(f[4] or 0) / 1000), tonumber(f[5]), f[6] or '', f[7] or '',
    math.floor(tonumber(until_ms) - now)}
end

-- worker, limit -> {id, account, attempt, enqueued_ms, started_ms, deadline_ms, worker, cancel,
-- left_ms}* of the jobs that it has leased; without a worker, of all whose leases end first
function operations.leases()
  local worker, limit, found = ARGV[2], tonumber(ARGV[3]), {}
  if worker == '' then
    local all = call('ZRANGE', LEASES, 0, limit - 1, 'WITHSCORES')
    for i = 1, #all, 2 do found[#found + 1] = at_work(all[i], all[i + 1]) end
  else
    for _, id in ipairs(call('SRANDMEMBER', WORKER .. worker, limit)) do
      local until_ms = call('ZSCORE', LEASES, id)
      if until_ms then found[#found + 1] = at_work(id, until_ms) end
    end
  end
  return found
end

-- limit -> as leases, of the jobs that wait for a retry, the first ones due first
function operations.delayed()
  local all, found = call('ZRANGE', DELAYED, 0, tonumber(ARGV[2]) - 1, 'WITHSCORES'), {}
  for i = 1, #all, 2 do found[#found + 1] = at_work(all[i], all[i + 1]) end
  return found
end

return operations[ARGV[1]]()
