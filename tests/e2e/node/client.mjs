// Everything that the test asks of OpenAI's client for JavaScript, in one run: prints what it saw as JSON.
import OpenAI from "openai";

const [baseURL, key, limitedKey] = process.argv.slice(2);
const messages = [{ role: "user", content: "Hello" }];
const common = { model: "warmpath-demo", messages, temperature: 0, max_tokens: 8 };
const client = new OpenAI({ baseURL, apiKey: key, maxRetries: 0, timeout: 60_000 });

async function streamed(options) {
  let text = "";
  let usage = null;
  let finish = null;
  for await (const chunk of await client.chat.completions.create({ ...common, ...options, stream: true })) {
    text += chunk.choices[0]?.delta.content ?? "";
    finish = chunk.choices[0]?.finish_reason ?? finish;
    usage = chunk.usage ?? usage;
  }
  return { text, usage, finish };
}

async function refused(ask) {
  try {
    await ask();
  } catch (error) {
    const { status, code, param, type, requestID } = error;
    return { kind: error.constructor.name, status, code, param, type, requestID };
  }
  return null;
}

async function abandoned() {
  const body = { ...common, stream: true, max_tokens: 1800, ignore_eos: true };
  const { data: stream, response } = await client.chat.completions.create(body).withResponse();
  for await (const _ of stream) break; // leaving the loop closes the connection
  return response.headers.get("x-request-id");
}

async function retried() {
  const statuses = [];
  const noting = async (...request) => {
    const response = await fetch(...request);
    statuses.push(response.status);
    return response;
  };
  const patient = new OpenAI({ baseURL, apiKey: limitedKey, maxRetries: 3, fetch: noting });
  const body = { ...common, temperature: 1, max_tokens: 1 }; // not from the cache, which no limit applies to
  for (let call = 0; call < 2; call += 1) await patient.chat.completions.create(body);
  return statuses;
}

const whole = await client.chat.completions.create(common);
const embedding = await client.embeddings.create({ model: "warmpath-demo", input: "hello" });
const floats = await client.embeddings.create({ model: "warmpath-demo", input: "hello", encoding_format: "float" });
const models = [];
for await (const model of client.models.list()) models.push(model.id);
const completion = await client.completions.create({ model: "demo", prompt: "Hello", max_tokens: 4 });
const helper = client.chat.completions.stream({ ...common, stream_options: { include_usage: true } });
const final = await helper.finalChatCompletion();
const asked = { model: "demo", input: "Hello", temperature: 0, max_output_tokens: 8 };
const response = await client.responses.create(asked);
const responding = client.responses.stream(asked);
let responded = "";
for await (const event of responding) if (event.type === "response.output_text.delta") responded += event.delta;
const stranger = new OpenAI({ baseURL, apiKey: "wp-dev-wrong", maxRetries: 0 });

console.log(
  JSON.stringify({
    whole: { text: whole.choices[0].message.content, usage: whole.usage, finish: whole.choices[0].finish_reason },
    plain: await streamed({}),
    counted: await streamed({ stream_options: { include_usage: true } }),
    final: { text: final.choices[0].message.content, usage: final.usage, finish: final.choices[0].finish_reason },
    responses: [response.output_text, responded, (await responding.finalResponse()).output_text],
    completion: completion.choices[0].text,
    embeddings: [embedding.data[0].embedding, floats.data[0].embedding],
    models,
    model: (await client.models.retrieve("demo")).id,
    errors: {
      key: await refused(() => stranger.models.list()),
      model: await refused(() => client.chat.completions.create({ ...common, model: "none" })),
      types: await refused(() => client.chat.completions.create({ ...common, max_tokens: "many" })),
      down: await refused(() => client.chat.completions.create({ ...common, model: "dead" })),
    },
    abandoned: await abandoned(),
    retried: await retried(),
  }),
);
