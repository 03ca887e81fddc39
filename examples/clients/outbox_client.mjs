// A client of the broker for JavaScript, written from docs/protocol.md alone. Not a library: copy what you need.
// Node 18 or later, no packages. Run by itself, it publishes, consumes and acknowledges:
//
//     node outbox_client.mjs http://127.0.0.1:7788 payment.completed ticketing
//
// Bodies are Buffers. Errors say whether the same request may be sent again (`error.again`).

import { randomUUID } from 'node:crypto'
import { pathToFileURL } from 'node:url'

const TIMEOUT_MS = 10_000
const BATCH_MAX = 1_000
const PUBLISH_BYTES_MAX = 4_000_000
const TRIES_MAX = 4
const PAUSE_MS_MAX = 30_000
const MAY_BE_REPEATED = new Set([ // the kinds of problems after which the same request may be sent again
  'head-too-slow', 'body-too-slow', 'throttled', 'overloaded', 'storage-failed', 'cordoned', 'stopping', 'internal',
])

export class BrokerError extends Error {
  constructor (message, { kind, again, retryAfterMs = null }) {
    super(message)
    this.kind = kind // the last part of the problem's type, or 'no-answer'
    this.again = again
    this.retryAfterMs = retryAfterMs
  }
}

export class OutboxClient {
  constructor (url, { token = null } = {}) {
    this.base = url.replace(/\/+$/, '')
    this.token = token
  }

  // messages: [{ body: Buffer | string, id?, key?, headers?, deliver_at_ms?, delay_ms? }]; one result each, in order.
  // An id is given here where there is none, once, so that a repeated request is a duplicate and not a second message.
  async publish (topic, messages) {
    const results = []
    const written = messages.map((one) => ({ id: randomUUID(), ...one, topic, ...writtenBody(one.body) }))
    for (const batch of publishes(written)) {
      const answer = await this.#repeat('POST', '/v1/publish', { messages: batch })
      results.push(...answer.results)
    }
    return results
  }

  // Waits up to waitMs for the first message. Never repeated: what a lost answer held comes back by itself.
  async pull (topic, group, { maxMessages = 100, waitMs = 0, invisibleMs = 30_000 } = {}) {
    const asked = { max_messages: maxMessages, wait_ms: waitMs, invisible_ms: invisibleMs }
    const answer = await this.#send('POST', `${place(topic, group)}/pull`, asked, waitMs)
    return answer.deliveries.map((one) => ({
      ...one, body: Buffer.from(one.body, one.encoding === 'base64' ? 'base64' : 'utf8'),
    }))
  }

  // Each receipt begins with the topic and group that it belongs to.
  async ack (receipts) {
    return this.#settle(receipts, (path, some) => this.#repeat('POST', `${path}/ack`, { receipts: some }))
  }

  async extend (receipts, invisibleMs) {
    return this.#settle(receipts, (path, some) =>
      this.#repeat('POST', `${path}/extend`, { receipts: some, invisible_ms: invisibleMs }))
  }

  async nack (receipts, { delayMs = null, reason = null, counts = true } = {}) {
    return this.#settle(receipts, (path, some) =>
      this.#send('POST', `${path}/nack`, { receipts: some, delay_ms: delayMs, reason, counts }))
  }

  async cancel (ids) {
    return (await this.#repeat('POST', '/v1/scheduled/cancel', { ids })).results
  }

  async #settle (receipts, send) {
    const places = new Map()
    for (const receipt of receipts) {
      const [topic, group] = receipt.split('/')
      const path = place(topic, group)
      places.set(path, [...(places.get(path) ?? []), receipt])
    }
    const found = new Map()
    for (const [path, own] of places) {
      for (const some of slices(own)) {
        for (const one of (await send(path, some)).results) found.set(one.receipt, one.status)
      }
    }
    return receipts.map((receipt) => found.get(receipt))
  }

  // For requests that may be sent again, as the protocol's table says.
  async #repeat (method, path, body) {
    for (let attempt = 1; ; attempt += 1) {
      try {
        return await this.#send(method, path, body)
      } catch (error) {
        if (!(error instanceof BrokerError) || !error.again || attempt === TRIES_MAX) throw error
        const pauseMs = error.retryAfterMs ?? 100 * 2 ** attempt * (0.5 + Math.random())
        await new Promise((resolve) => setTimeout(resolve, Math.min(pauseMs, PAUSE_MS_MAX)))
      }
    }
  }

  async #send (method, path, body, waitMs = 0) {
    const headers = { 'content-type': 'application/json', accept: 'application/json' }
    if (this.token !== null) headers.authorization = `Bearer ${this.token}`
    let response, text
    try {
      response = await fetch(this.base + path, {
        method, headers, body: JSON.stringify(body), redirect: 'error', signal: AbortSignal.timeout(TIMEOUT_MS + waitMs),
      })
      text = await response.text() // an answer that breaks off counts as none
    } catch (error) {
      throw new BrokerError(`${method} ${path}: ${error.cause?.message ?? error.message}`, { kind: 'no-answer', again: true })
    }
    if (response.status === 200) return JSON.parse(text)
    throw problem(response, text, `${method} ${path}`)
  }
}

// What is no problem document comes from something in between: it may pass.
function problem (response, text, what) {
  let found = {}
  try {
    found = JSON.parse(text)
  } catch {}
  const kind = String(found.type ?? '').replace('urn:outbox-mq:problem:', '') || `status-${response.status}`
  const again = MAY_BE_REPEATED.has(kind) || kind.startsWith('status-')
  return new BrokerError(`${what}: ${found.detail ?? response.statusText}`, { kind, again, retryAfterMs: found.retry_after_ms })
}

function writtenBody (body) {
  const bytes = Buffer.from(body)
  const text = bytes.toString('utf8')
  if (Buffer.from(text, 'utf8').equals(bytes)) return { body: text, encoding: 'utf8' }
  return { body: bytes.toString('base64'), encoding: 'base64' }
}

function place (topic, group) {
  return `/v1/topics/${topic}/groups/${group}`
}

// A publish of several messages in JSON has 4 MiB at most.
function * publishes (messages) {
  let batch = []
  let bytes = 0
  for (const message of messages) {
    const more = Buffer.byteLength(JSON.stringify(message)) + 1
    if (batch.length && (batch.length === BATCH_MAX || bytes + more > PUBLISH_BYTES_MAX)) {
      yield batch
      batch = []
      bytes = 0
    }
    batch.push(message)
    bytes += more
  }
  if (batch.length) yield batch
}

function * slices (entries) {
  for (let start = 0; start < entries.length; start += BATCH_MAX) yield entries.slice(start, start + BATCH_MAX)
}

// The whole of a consumer: pull, handle, acknowledge what was handled, give back what failed.
export async function consume (client, topic, group, handle, { until, waitMs = 10_000 }) {
  while (!until()) {
    for (const delivery of await client.pull(topic, group, { waitMs })) {
      try {
        await handle(delivery)
        await client.ack([delivery.receipt])
      } catch (error) {
        await client.nack([delivery.receipt], { reason: String(error.message).slice(0, 1024) })
      }
    }
  }
}

async function main ([url, topic = 'payment.completed', group = 'ticketing']) {
  const client = new OutboxClient(url, { token: process.env.OUTBOX_TOKEN ?? null })
  const bodies = ['{"order_id": 17}', Buffer.from([0, 255, 254])]
  const [first] = await client.publish(topic, [{ id: 'order-17', key: '17', body: bodies[0] }])
  const [again] = await client.publish(topic, [{ id: 'order-17', key: '17', body: bodies[0] }])
  await client.publish(topic, [{ body: bodies[1], headers: { type: 'binary' } }])
  console.log(`published: ${first.status}, ${again.status}`)
  const seen = []
  await consume(client, topic, group, (delivery) => {
    seen.push(delivery.body)
    if (delivery.attempt === 1 && delivery.key === '17') {
      seen.pop()
      throw new Error('not yet')
    }
    console.log(`handled: ${delivery.id === 'order-17' ? delivery.id : 'binary'} attempt ${delivery.attempt} ${delivery.body.toString('hex')}`)
  }, { until: () => seen.length === 2 })
  await client.publish(topic, [{ id: 'trip-17', body: '', delay_ms: 86_400_000 }])
  console.log(`canceled: ${(await client.cancel(['trip-17']))[0].status}`)
  const refused = await client.publish(topic, [{ id: 'no such id!', body: '' }]).catch((error) => error)
  console.log(`refused: ${refused.kind}, again: ${refused.again}`)
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) await main(process.argv.slice(2))
