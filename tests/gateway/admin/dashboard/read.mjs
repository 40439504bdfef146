// The samples of a text in Prometheus' format, from stdin, as JSON.
import { parse } from "../../../../gateway/admin/dashboard/prometheus.js";

const chunks = [];
for await (const chunk of process.stdin) chunks.push(chunk);
const { families } = parse(Buffer.concat(chunks).toString(), 0);
const samples = [...families].flatMap(([name, found]) =>
  found.map(({ labels, value }) => [name, { ...labels }, String(value)]),
);
process.stdout.write(JSON.stringify(samples));
