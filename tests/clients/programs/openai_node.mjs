// OpenAI's client for JavaScript: chats, streams, its tool runner, responses, embeddings, models.
import assert from 'node:assert'
import OpenAI from 'openai'

const scripted = process.env.AGAINST === 'scripted'
const client = new OpenAI({ maxRetries: 0 })
const messages = [{ role: 'user', content: 'hi' }]
const asked = [{ role: 'user', content: 'CALL weather {"city": "Rome"}' }]
const parameters = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] }

const whole = await client.chat.completions.create({ model: 'm', messages })
assert(whole.choices[0].message.content && whole.usage.total_tokens)
const stream = client.chat.completions.stream({ model: 'm', messages, stream_options: { include_usage: true } })
assert((await stream.finalChatCompletion()).usage.total_tokens)
for (const streamed of [false, true]) {
  const runner = client.chat.completions.runTools({
    model: 'm', messages: asked, stream: streamed,
    tools: [{
      type: 'function',
      function: { name: 'weather', parameters, parse: JSON.parse, function: ({ city }) => `sunny in ${city}` },
    }],
  })
  const said = await runner.finalContent()
  assert(said === 'The tool said: sunny in Rome' || !scripted, said)
}
const response = await client.responses.stream({ model: 'm', input: 'hi' }).finalResponse()
assert(response.output_text)
const called = await client.responses.create({
  model: 'm', input: asked, tools: [{ type: 'function', name: 'weather', parameters, strict: false }],
  tool_choice: 'required',
})
assert(called.output.some((item) => item.type === 'function_call'))
assert.equal((await client.embeddings.create({ model: 'm', input: ['a', 'b'] })).data.length, 2)
assert.equal((await client.models.retrieve('m')).id, 'm')
