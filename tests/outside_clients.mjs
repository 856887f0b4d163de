// What the AI SDK says to the endpoint: `node outside_clients.mjs URL`, where its packages are.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, streamText } from "ai";

const openai = createOpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none" });
const question = { role: "user", content: "What is 12+34?" };

// Its models speak the Responses API by default, and send all that was said each time.
for (const [model, options] of [
  [openai("agent/calculator"), {}],
  [openai("agent/calculator"), { providerOptions: { openai: { store: false } } }],
  [openai.chat("agent/calculator"), {}],
]) {
  const messages = [question];
  for (let turn = 0; turn < 3; turn++) {
    const { text, response } = await generateText({ model, messages, maxRetries: 0, ...options });
    assert.equal(text, "46");
    messages.push(...response.messages, question);
  }
  const stream = streamText({ model, messages, maxRetries: 0, ...options });
  assert.equal(await stream.text, "46");
}
