// Vercel's ai: an answer, a stream, a tool call, an object and an error.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from "ai";
import { HELLO, Person, add, key, model, show, url } from "./common.mjs";

const kvrelay = createOpenAICompatible({
  name: "kvrelay",
  baseURL: `${url}/v1`,
  apiKey: key,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const hello = { model: kvrelay(model), prompt: HELLO, temperature: 0, maxRetries: 0 };
const short = { ...hello, maxOutputTokens: 8 };
const whole = await generateText(short);
const stream = streamText(short);
const chunks = [];
for await (const chunk of stream.textStream) chunks.push(chunk);
const asked = [];
const adding = tool({
  description: "Add two numbers.",
  inputSchema: add,
  execute: async (numbers) => {
    asked.push(["add", numbers]);
    return numbers.a + numbers.b;
  },
});
const agent = await generateText({ ...hello, maxOutputTokens: 60, tools: { add: adding }, stopWhen: stepCountIs(2) });
const person = await generateText({ ...hello, maxOutputTokens: 60, output: Output.object({ schema: Person }) });
const refused = await generateText({ ...hello, model: kvrelay("nobody") }).then(
  () => "",
  (why) => (APICallError.isInstance(why) && why.statusCode === 404 ? why.message : `not a 404: ${why}`),
);
show({
  whole: whole.text,
  chunks,
  tokens: (await stream.usage).outputTokens,
  called: asked[0],
  steps: agent.steps.length,
  object: person.output,
  refused,
});
