// @ts-check
// Reads server-sent events of a streamed answer.

/**
 * The data of each event, as far as it is JSON. The event [DONE] ends the stream.
 * @param {ReadableStream<Uint8Array>} body @returns {AsyncGenerator<any>}
 */
export async function* events(body) {
  let text = "";
  const decoder = new TextDecoder();
  const reader = body.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    text += decoder.decode(value, { stream: !done });
    const lines = text.split(/\r?\n/);
    text = done ? "" : (lines.pop() ?? "");
    for (const line of lines) {
      const data = /^data: ?(.*)$/.exec(line)?.[1];
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
    if (done) return;
  }
}
