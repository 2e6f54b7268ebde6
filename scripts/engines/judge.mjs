// What llama.cpp makes of a GGUF file: tokens of texts, greedy continuations, distributions. Reads one JSON object from
// standard input and prints one:
//   {"model": path, "texts": [text], "greedy": {"prompts": [[id]], "count": n}, "sequences": [[id]], "top": k}
//   {"tokens": [[id]], "greedy": [[id]], "top": [[[[id, log p]]]]}
// "top" holds, for each position of each sequence, the k likeliest next tokens.
import {getLlama, LlamaLogLevel} from "node-llama-cpp";

const asked = JSON.parse(await new Response(process.stdin).text());
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error});
const model = await llama.loadModel({modelPath: asked.model});
const result = {tokens: (asked.texts ?? []).map((text) => model.tokenize(text, true)), greedy: [], top: []};
const greedy = asked.greedy ?? {prompts: [], count: 0};
if (greedy.prompts.length + (asked.sequences ?? []).length > 0) {
    const context = await model.createContext({contextSize: 1024, threads: 2});
    const sequence = context.getSequence();
    for (const prompt of greedy.prompts) {
        await sequence.clearHistory();
        const made = [];
        for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
            made.push(token);
            if (made.length >= greedy.count || model.isEogToken(token)) break;
        }
        result.greedy.push(made);
    }
    for (const ids of asked.sequences ?? []) {
        await sequence.clearHistory();
        const input = ids.map((id) => [id, {generateNext: {probabilities: true, options: {temperature: 1, topK: 0, topP: 1, minP: 0}}}]);
        const outputs = await sequence.controlledEvaluate(input);
        result.top.push(outputs.map(({next}) =>
            [...next.probabilities.entries()].slice(0, asked.top).map(([id, p]) => [id, Math.log(p)])));
    }
}
// a pipe takes it in parts: to exit at once would cut it off
process.stdout.write(JSON.stringify(result), () => process.exit(0));
