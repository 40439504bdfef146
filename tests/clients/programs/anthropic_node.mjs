// Anthropic's client for JavaScript: messages, streams, its tool runner, token counts.
import assert from 'node:assert'
import Anthropic from '@anthropic-ai/sdk'
import { betaTool } from '@anthropic-ai/sdk/helpers/beta/json-schema'

const scripted = process.env.AGAINST === 'scripted'
const client = new Anthropic({ maxRetries: 0 })
const messages = [{ role: 'user', content: 'hi' }]
const whole = await client.messages.create({ model: 'm', max_tokens: 100, messages })
assert(whole.content[0].text && whole.usage.output_tokens)
const stream = client.messages.stream({ model: 'm', max_tokens: 100, messages })
assert((await stream.finalMessage()).content.length)
const weather = betaTool({
  name: 'weather', description: 'Looks the weather up.',
  inputSchema: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] },
  run: ({ city }) => `sunny in ${city}`,
})
for (const streamed of [false, true]) {
  const runner = client.beta.messages.toolRunner({
    model: 'm', max_tokens: 200, tools: [weather], stream: streamed,
    messages: [{ role: 'user', content: 'CALL weather {"city": "Rome"}' }],
  })
  const last = await runner.runUntilDone()
  const text = last.content.filter((block) => block.type === 'text').map((block) => block.text).join('')
  assert(text === 'The tool said: sunny in Rome' || !scripted, text)
}
assert(scripted || (await client.messages.countTokens({ model: 'm', messages })).input_tokens > 0)
