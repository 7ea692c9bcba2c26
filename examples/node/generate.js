// Streams an answer of Headwater's router: `node generate.js [options] PROMPT`, see options below.
// The protos are loaded as they are; Ctrl-C cancels the request.

import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

const pathOf = (relative) => fileURLToPath(new URL(relative, import.meta.url));
const definitions = protoLoader.loadSync(
  ['headwater/v1/router_service.proto', 'error_details.proto'],
  { includeDirs: [pathOf('../../proto'), pathOf('..')], enums: String, longs: Number, keepCase: true },
);
const { headwater } = grpc.loadPackageDefinition(definitions);

const { values: options, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    address: { type: 'string', default: '127.0.0.1:50050' },
    chat: { type: 'boolean', default: false },
    'max-tokens': { type: 'string', default: '64' },
    deadline: { type: 'string', default: '60' }, // seconds
  },
});
const prompt = positionals.join(' ');
const request = {
  ...(options.chat ? { chat: { messages: [{ role: 'user', content: prompt }] } } : { text: prompt }),
  sampling: { temperature: 0, max_tokens: Number(options['max-tokens']) },
};

// The details of an error, by the name of their message.
function detailsOf(error) {
  const [status] = error.metadata.get('grpc-status-details-bin');
  if (!status) return {};
  const details = definitions['google.rpc.Status'].deserialize(status).details ?? [];
  return Object.fromEntries(
    details.map(({ type_url: url, value }) => {
      const name = url.split('/').pop();
      return [name, definitions[name]?.deserialize(value)];
    }),
  );
}

function report(error) {
  console.error(`\n${grpc.status[error.code]}: ${error.details}`);
  const { 'google.rpc.ErrorInfo': info, 'google.rpc.BadRequest': bad } = detailsOf(error);
  if (info) console.error(`reason: ${info.reason}`);
  for (const { field, description } of bad?.field_violations ?? []) {
    console.error(`field: ${field}: ${description}`);
  }
}

const client = new headwater.v1.RouterService(options.address, grpc.credentials.createInsecure());
const call = client.Generate(request, { deadline: Date.now() + 1000 * Number(options.deadline) });
process.once('SIGINT', () => call.cancel());
try {
  for await (const { text, finish_reason: reason, usage } of call) {
    process.stdout.write(text ?? '');
    if (usage) {
      console.log(`\n${reason}: ${usage.prompt_tokens} prompt tokens, ${usage.completion_tokens} new`);
    }
  }
} catch (error) {
  report(error);
  process.exitCode = 1;
} finally {
  client.close();
}
