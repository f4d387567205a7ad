// openai of npm: an answer, a stream, a tool call, an object, a streamed response and an error.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { HELLO, Person, add, key, model, show, url } from "./common.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const chat = client.chat.completions;
const hello = { model, messages: [{ role: "user", content: HELLO }] };
const short = { ...hello, max_tokens: 8, temperature: 0 };
const whole = await chat.create(short);
const chunks = [];
for await (const chunk of await chat.create({ ...short, stream: true })) {
  chunks.push(chunk.choices[0].delta.content ?? "");
}
const tools = [{ type: "function", function: { name: "add", parameters: add.toJSONSchema() } }];
const [called] = (await chat.create({ ...hello, tools })).choices[0].message.tool_calls;
const asked = { ...short, max_tokens: 60, response_format: zodResponseFormat(Person, "person") };
const person = await chat.parse(asked);
const response = client.responses.stream({ model, input: HELLO, temperature: 0 });
const kinds = [];
for await (const event of response) kinds.push(event.type);
const refused = await chat.create({ ...hello, model: "nobody" }).then(
  () => "",
  (why) => (why instanceof OpenAI.NotFoundError ? why.message : `not its NotFoundError: ${why}`),
);
show({
  whole: whole.choices[0].message.content,
  chunks,
  tokens: whole.usage.completion_tokens,
  called: [called.function.name, JSON.parse(called.function.arguments)],
  object: person.choices[0].message.parsed,
  refused,
  kinds,
  said: (await response.finalResponse()).output_text,
});
