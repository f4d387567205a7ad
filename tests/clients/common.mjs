// What the scripts share: their arguments, what they ask for, and how they print what came.
import { z } from "zod";

export const [url, key, model] = process.argv.slice(2);
export const HELLO = "Say hello.";
export const Person = z.object({ name: z.string().max(12), age: z.number().int().min(0).max(120) });
export const add = z.object({ a: z.number().int(), b: z.number().int() });
export const show = (found) => console.log(JSON.stringify(found));
