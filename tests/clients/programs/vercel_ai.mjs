// Vercel's AI SDK: texts, streams, tools and objects, by chats, responses, messages and its OpenAI-compatible provider.
import assert from 'node:assert'
import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'

const scripted = process.env.AGAINST === 'scripted'
const { OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY } = process.env
const openai = createOpenAI({ baseURL: OPENAI_BASE_URL, apiKey: OPENAI_API_KEY })
const anthropic = createAnthropic({ baseURL: `${ANTHROPIC_BASE_URL}/v1`, apiKey: ANTHROPIC_API_KEY })
const compatible = createOpenAICompatible({ name: 'warmpath', baseURL: OPENAI_BASE_URL, apiKey: OPENAI_API_KEY })
const weather = tool({
  description: 'Looks the weather up.', inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `sunny in ${city}`,
})
const ask = 'CALL weather {"city": "Rome"}'
const options = { maxRetries: 0, maxOutputTokens: 200, onError: ({ error }) => { throw error } }

for (const model of [openai('m'), openai.chat('m'), openai.responses('m'), anthropic('m'), compatible('m')]) {
  const plain = await generateText({ model, prompt: 'hi', ...options })
  assert(plain.text && plain.usage.outputTokens, model.provider)
  const tools = { weather }
  const agent = await generateText({ model, prompt: ask, tools, stopWhen: stepCountIs(3), ...options })
  assert(agent.text.includes('sunny in Rome') || !scripted, `${model.provider}: ${agent.text}`)
  const streamed = streamText({ model, prompt: ask, tools, stopWhen: stepCountIs(3), ...options })
  const text = await streamed.text
  assert(text.includes('sunny in Rome') || !scripted, `${model.provider} streamed: ${text}`)
  if (scripted) {
    const output = Output.object({ schema: z.object({ name: z.string() }) })
    const object = await generateText({ model, prompt: 'ANSWER {"name": "Rome"}', output, ...options })
    assert.equal(object.output.name, 'Rome', model.provider)
  }
}
const embedded = await embedMany({ model: openai.embedding('m'), values: ['a', 'b'], maxRetries: 0 })
assert.equal(embedded.embeddings.length, 2)
