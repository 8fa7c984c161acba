// Clients of other makers by their defaults: prints what each of them got, as JSON.
// Run where they are installed, see make clients: node node_clients.mjs FOLDER URL MODEL

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, url, model] = process.argv.slice(2);
const require = createRequire(`${folder}/package.json`);
const load = async (name) => import(pathToFileURL(require.resolve(name)).href);

const { default: OpenAI } = await load("openai");
const { default: Anthropic } = await load("@anthropic-ai/sdk");
const { generateText, streamText, tool } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { z } = await load("zod");

const ask = "def add(a, b):";
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none" });
const messages = [{ role: "user", content: ask }];

const sdk = {
  responses: async () => {
    const whole = await openai.responses.create({ model, input: ask, max_output_tokens: 50 });
    let text = "";
    for await (const event of await openai.responses.create({
      model, input: ask, max_output_tokens: 50, stream: true,
    })) {
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    return [whole.output_text.length > 0, text.length > 0];
  },
  messages: async () => {
    const whole = await anthropic.messages.create({ model, messages, max_tokens: 50 });
    const streamed = await anthropic.messages.stream({ model, messages, max_tokens: 50 }).finalMessage();
    const counted = await anthropic.messages.countTokens({ model, messages });
    return [whole.content[0].text.length > 0, streamed.content[0].text.length > 0, counted.input_tokens > 0];
  },
};

const of = (made) => async () => {
  const text = await generateText({ model: made, prompt: ask, maxOutputTokens: 50 });
  let streamed = "";
  for await (const part of streamText({ model: made, prompt: ask, maxOutputTokens: 50 }).textStream) streamed += part;
  const called = await generateText({
    model: made, prompt: ask, toolChoice: "required",
    providerOptions: { openai: { parallelToolCalls: false }, anthropic: { disableParallelToolUse: true } },
    tools: {
      double: tool({
        description: "Return a number twice as large.", inputSchema: z.object({ number: z.number() }),
        execute: async ({ number }) => 2 * number,
      }),
    },
  });
  return [text.text.length > 0, streamed.length > 0, called.toolResults.length > 0];
};

const key = { apiKey: "none" };
const byOpenAI = createOpenAI({ baseURL: `${url}/v1`, ...key });
const runs = {
  "openai responses": sdk.responses, "anthropic messages": sdk.messages,
  "ai-sdk openai": of(byOpenAI(model)), "ai-sdk openai.chat": of(byOpenAI.chat(model)),
  "ai-sdk anthropic": of(createAnthropic({ baseURL: `${url}/v1`, ...key })(model)),
};
const got = {};
for (const [name, run] of Object.entries(runs)) {
  got[name] = await run().catch((error) => `${error.name}: ${error.message}`);
}
console.log(JSON.stringify(got));
